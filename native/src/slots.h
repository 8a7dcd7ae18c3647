/* slots.h: one worker's staging memory. */
#ifndef STRIATE_SLOTS_H
#define STRIATE_SLOTS_H

#include <stddef.h>
#include <stdint.h>

struct st_slots {
	uint8_t *base; /* ST_ALIGN-aligned; slot i is at base + i * slot_bytes */
	size_t slot_bytes;
	unsigned count;
	void *map;
	size_t map_bytes;
};

/* slot_bytes: a multiple of ST_ALIGN, or 0 for none. 0 or -errno. */
int st_slots_open(struct st_slots *slots, unsigned count, size_t slot_bytes);
void st_slots_close(struct st_slots *slots);

#endif
