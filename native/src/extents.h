/* extents.h: walking a gather list, a slice at a time. */
#ifndef STRIATE_EXTENTS_H
#define STRIATE_EXTENTS_H

#include <stdbool.h>
#include <sys/uio.h>
#include "striate.h"

/* A place in a job's extents. */
struct st_cursor {
	const struct st_extent *extent;
	uint64_t skip; /* bytes of it already passed */
};

/* Copies out of memory that may vanish under the copy: a mapped file that
 * was truncated makes the kernel answer EFAULT where a load would be SIGBUS.
 * Zero it before use. */
struct st_ferry {
	bool pipe_open, refused; /* refused: process_vm_readv is not allowed here */
	int pipe[2];
};

void st_ferry_close(struct st_ferry *ferry);

/* The next piece of memory, at most *length bytes of it; *length becomes its length. */
uint8_t *st_cursor_next(struct st_cursor *cursor, uint64_t *length);

/* Extents -> to. ferry: NULL for memory that is simply there. 0 or -errno. */
int st_gather(struct st_cursor *cursor, uint8_t *to, uint64_t length, struct st_ferry *ferry);

/* from -> extents; those with address 0 are passed over. */
void st_scatter(struct st_cursor *cursor, const uint8_t *from, uint64_t length);

/* Fills iov with bytes [skip, skip + length) of the extents. The count, or
 * iov_max + 1 when they do not fit. */
unsigned st_extents_iov(
	const struct st_extent *extents, uint64_t skip, uint64_t length, struct iovec *iov, unsigned iov_max);

#endif
