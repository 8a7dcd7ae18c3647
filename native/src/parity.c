/* parity.c: ISA-L's Reed-Solomon, with the tables of one matrix kept: nearly
 * all groups of a run have the same. */
#include "parity.h"

#include <errno.h>
#include <isa-l/erasure_code.h>
#include <stdlib.h>

/* Of ISA-L: an expanded factor. */
#define TABLE_BYTES 32u

int st_parity_prepare(struct st_parity *parity, const uint8_t *matrix, unsigned inputs, unsigned outputs)
{
	uint8_t *tables;

	if (parity->tables && parity->matrix == matrix && parity->inputs == inputs &&
		parity->outputs == outputs)
		return 0;
	tables = malloc((size_t)TABLE_BYTES * inputs * outputs);
	if (!tables)
		return -ENOMEM;
	ec_init_tables((int)inputs, (int)outputs, (unsigned char *)matrix, tables);
	st_parity_close(parity);
	*parity =
		(struct st_parity){.matrix = matrix, .inputs = inputs, .outputs = outputs, .tables = tables};
	return 0;
}

void st_parity_compute(const struct st_parity *parity, size_t length, uint8_t **inputs, uint8_t **outputs)
{
	ec_encode_data(
		(int)length, (int)parity->inputs, (int)parity->outputs, parity->tables, inputs, outputs);
}

void st_parity_close(struct st_parity *parity)
{
	free(parity->tables);
	*parity = (struct st_parity){0};
}
