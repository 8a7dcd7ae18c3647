/* checksum.c: one flavour of XXH3-128. Compiled once for each level with that
 * level's machine flags, from which xxhash.h picks its vector code; nothing
 * else of the engine may live here, as it would run on no older CPU. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "checksum.h"

#ifndef ST_CHECKSUM_LEVEL
#define ST_CHECKSUM_LEVEL baseline /* or avx2, avx512: CMakeLists.txt says which */
#endif
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

_Static_assert(sizeof(XXH3_state_t) <= sizeof(struct st_hash), "xxhash's state outgrew struct st_hash");
_Static_assert(alignof(XXH3_state_t) <= alignof(struct st_hash), "xxhash's state wants more alignment");
_Static_assert(sizeof(XXH128_canonical_t) == ST_DIGEST_BYTES, "a digest is 16 bytes");

static void canonical(XXH128_hash_t hash, uint8_t digest[ST_DIGEST_BYTES])
{
	XXH128_canonical_t out;

	XXH128_canonicalFromHash(&out, hash);
	for (unsigned i = 0; i < ST_DIGEST_BYTES; i++)
		digest[i] = out.digest[i];
}

static void reset(struct st_hash *hash, uint64_t seed)
{
	XXH3_state_t *state = (XXH3_state_t *)hash;

	/* reset compares with the seed of before, so there must be one. */
	XXH3_INITSTATE(state);
	XXH3_128bits_reset_withSeed(state, seed);
}

static void update(struct st_hash *hash, const void *data, size_t length)
{
	XXH3_128bits_update((XXH3_state_t *)hash, data, length);
}

static void digest_of(const struct st_hash *hash, uint8_t digest[ST_DIGEST_BYTES])
{
	canonical(XXH3_128bits_digest((const XXH3_state_t *)hash), digest);
}

static void whole(const void *data, size_t length, uint64_t seed, uint8_t digest[ST_DIGEST_BYTES])
{
	canonical(XXH3_128bits_withSeed(data, length, seed), digest);
}

const struct st_hasher PASTE(st_hasher_, ST_CHECKSUM_LEVEL) = {
	.level = TEXT(ST_CHECKSUM_LEVEL),
	.reset = reset,
	.update = update,
	.digest = digest_of,
	.whole = whole,
};
