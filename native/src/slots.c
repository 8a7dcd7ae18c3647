/* slots.c: aligned memory for one worker: mapped by it, used by it alone. */
#include "slots.h"

#include <errno.h>
#include <sys/mman.h>

#define HUGE_BYTES ((size_t)2 << 20)

int st_slots_open(struct st_slots *slots, unsigned count, size_t slot_bytes)
{
	size_t bytes;

	*slots = (struct st_slots){.slot_bytes = slot_bytes, .count = count};
	if (!slot_bytes || !count)
		return 0;
	if (__builtin_mul_overflow(slot_bytes, count, &bytes) || bytes > SIZE_MAX / 2)
		return -ENOMEM;
	/* Address space for one huge page more, so that the slots can begin on
	 * one; what is never touched costs nothing. */
	slots->map_bytes = bytes < HUGE_BYTES ? bytes : bytes + HUGE_BYTES;
	slots->map = mmap(NULL, slots->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (slots->map == MAP_FAILED) {
		slots->map = NULL;
		return -errno;
	}
	slots->base = slots->map;
	if (bytes >= HUGE_BYTES) {
		slots->base =
			(uint8_t *)(((uintptr_t)slots->map + HUGE_BYTES - 1) & ~(uintptr_t)(HUGE_BYTES - 1));
		/* Fewer faults, and less for the kernel to pin. A kernel without
		 * huge pages refuses: nothing lost. */
		madvise(slots->base, bytes, MADV_HUGEPAGE);
	}
	/* A child of fork must not share pages that a drive writes into: with
	 * copy-on-write the parent could be left with the other copy. */
	if (madvise(slots->map, slots->map_bytes, MADV_DONTFORK) < 0) {
		int ret = -errno;

		st_slots_close(slots);
		return ret;
	}
	return 0;
}

void st_slots_close(struct st_slots *slots)
{
	if (slots->map)
		munmap(slots->map, slots->map_bytes);
	*slots = (struct st_slots){0};
}
