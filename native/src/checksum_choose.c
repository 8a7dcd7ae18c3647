/* checksum_choose.c: which flavour of checksum.c this CPU runs, and the
 * checksums that callers outside a run ask for. */
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "checksum.h"

const struct st_hasher *st_hasher_choose(void)
{
#ifdef ST_CHECKSUM_X86
	/* Also looks at whether the operating system saves the wide registers. */
	if (__builtin_cpu_supports("avx512f"))
		return &st_hasher_avx512;
	if (__builtin_cpu_supports("avx2"))
		return &st_hasher_avx2;
#endif
	return &st_hasher_baseline;
}

const char *st_checksum_level(void)
{
	return st_hasher_choose()->level;
}

void st_checksum(const void *data, size_t length, uint64_t seed, uint8_t digest[ST_DIGEST_BYTES])
{
	st_hasher_choose()->whole(data, length, seed, digest);
}

uint64_t st_block_seed(const uint8_t uuid[16], uint64_t index)
{
	uint8_t bytes[24];

	memcpy(bytes, uuid, 16);
	for (unsigned i = 0; i < 8; i++)
		bytes[16 + i] = (uint8_t)(index >> (8 * i));
	return XXH3_64bits(bytes, sizeof(bytes));
}
