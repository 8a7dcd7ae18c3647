/* parity.h: sums of blocks over GF(2^8), which make check blocks and bring
 * lost blocks back. */
#ifndef STRIATE_PARITY_H
#define STRIATE_PARITY_H

#include <stddef.h>
#include <stdint.h>

/* A matrix made ready for one worker; owns its tables. Zero it before use. */
struct st_parity {
	const uint8_t *matrix; /* whose tables these are */
	unsigned inputs, outputs;
	uint8_t *tables;
};

/* Makes it ready for outputs x inputs factors. 0 or -ENOMEM. */
int st_parity_prepare(struct st_parity *parity, const uint8_t *matrix, unsigned inputs, unsigned outputs);
/* outputs[j] = sum of matrix[j][i] * inputs[i], length bytes of each. */
void st_parity_compute(const struct st_parity *parity, size_t length, uint8_t **inputs, uint8_t **outputs);
void st_parity_close(struct st_parity *parity);

#endif
