/* extents.c: gather and scatter between a job's extents and flat memory. */
#include "extents.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* What a pipe holds unless told otherwise (pipe(7)). A write of this much
 * into an empty pipe never blocks. */
#define PIPE_BYTES 65536u

uint8_t *st_cursor_next(struct st_cursor *cursor, uint64_t *length)
{
	uint64_t addr, left;

	while (cursor->skip == cursor->extent->length) {
		cursor->extent++;
		cursor->skip = 0;
	}
	left = cursor->extent->length - cursor->skip;
	addr = cursor->extent->addr ? cursor->extent->addr + cursor->skip : 0;
	if (*length > left)
		*length = left;
	cursor->skip += *length;
	return (uint8_t *)(uintptr_t)addr;
}

/* Through a pipe: a write(2) from bad memory is EFAULT everywhere, also where
 * a sandbox forbids process_vm_readv. */
static int ferry_by_pipe(struct st_ferry *ferry, uint8_t *to, const uint8_t *from, uint64_t length)
{
	if (!ferry->pipe_open) {
		if (pipe2(ferry->pipe, O_CLOEXEC | O_NONBLOCK) < 0)
			return -errno;
		ferry->pipe_open = true;
	}
	while (length) {
		ssize_t in = write(ferry->pipe[1], from, length < PIPE_BYTES ? length : PIPE_BYTES);
		ssize_t out = 0;

		if (in < 0 && errno == EINTR)
			continue;
		if (in <= 0)
			return in ? -errno : -EIO;
		while (out < in) {
			ssize_t got = read(ferry->pipe[0], to + out, (size_t)(in - out));

			if (got < 0 && errno == EINTR)
				continue;
			if (got <= 0)
				return got ? -errno : -EIO;
			out += got;
		}
		from += in;
		to += in;
		length -= (uint64_t)in;
	}
	return 0;
}

static int ferry_copy(struct st_ferry *ferry, uint8_t *to, const uint8_t *from, uint64_t length)
{
	while (length && !ferry->refused) {
		struct iovec local = {.iov_base = to, .iov_len = length};
		struct iovec remote = {.iov_base = (void *)from, .iov_len = length};
		ssize_t moved = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);

		if (moved < 0 && (errno == EPERM || errno == ENOSYS || errno == EACCES))
			ferry->refused = true;
		else if (moved <= 0)
			return moved ? -errno : -EFAULT;
		else {
			to += moved;
			from += moved;
			length -= (uint64_t)moved;
		}
	}
	return length ? ferry_by_pipe(ferry, to, from, length) : 0;
}

void st_ferry_close(struct st_ferry *ferry)
{
	if (ferry->pipe_open) {
		close(ferry->pipe[0]);
		close(ferry->pipe[1]);
	}
	ferry->pipe_open = false;
}

int st_gather(struct st_cursor *cursor, uint8_t *to, uint64_t length, struct st_ferry *ferry)
{
	while (length) {
		uint64_t piece = length;
		const uint8_t *from = st_cursor_next(cursor, &piece);

		if (ferry) {
			int ret = ferry_copy(ferry, to, from, piece);

			if (ret < 0)
				return ret;
		} else {
			memcpy(to, from, piece);
		}
		to += piece;
		length -= piece;
	}
	return 0;
}

void st_scatter(struct st_cursor *cursor, const uint8_t *from, uint64_t length)
{
	while (length) {
		uint64_t piece = length;
		uint8_t *to = st_cursor_next(cursor, &piece);

		if (to)
			memcpy(to, from, piece);
		from += piece;
		length -= piece;
	}
}

unsigned st_extents_iov(
	const struct st_extent *extents, uint64_t skip, uint64_t length, struct iovec *iov, unsigned iov_max)
{
	struct st_cursor cursor = {.extent = extents};
	unsigned count = 0;

	while (skip) {
		uint64_t piece = skip;

		st_cursor_next(&cursor, &piece);
		skip -= piece;
	}
	while (length) {
		uint64_t piece = length;
		void *base = st_cursor_next(&cursor, &piece);

		if (count == iov_max)
			return iov_max + 1;
		iov[count++] = (struct iovec){.iov_base = base, .iov_len = piece};
		length -= piece;
	}
	return count;
}
