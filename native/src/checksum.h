/* checksum.h: XXH3-128 of a stream, in the fastest form that this CPU runs. */
#ifndef STRIATE_CHECKSUM_H
#define STRIATE_CHECKSUM_H

#include <stdalign.h>
#include "striate.h"

/* Room for xxhash's own state, whose vectors want cache-line alignment. */
struct st_hash {
	alignas(64) unsigned char state[640];
};

struct st_hasher {
	const char *level;
	void (*reset)(struct st_hash *hash, uint64_t seed);
	void (*update)(struct st_hash *hash, const void *data, size_t length);
	/* Canonical: big-endian, high half first. */
	void (*digest)(const struct st_hash *hash, uint8_t digest[ST_DIGEST_BYTES]);
	void (*whole)(const void *data, size_t length, uint64_t seed, uint8_t digest[ST_DIGEST_BYTES]);
};

/* One for each time that checksum.c is compiled. */
extern const struct st_hasher st_hasher_baseline;
#ifdef ST_CHECKSUM_X86
extern const struct st_hasher st_hasher_avx2;
extern const struct st_hasher st_hasher_avx512;
#endif

/* The best of them here. */
const struct st_hasher *st_hasher_choose(void);

#endif
