/* io.c: the public st_* calls on a drive, handed on to an engine, and the
 * small helpers that every engine shares. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "io.h"

/* Of st_read's bounce buffer. */
#define BOUNCE_BYTES (1u << 20)

void st_io_free(struct st_io *io)
{
	if (io)
		io->ops->free(io);
}

const char *st_io_name(const struct st_io *io)
{
	return io->name;
}

int st_open(struct st_io *io, int dirfd, const char *name, int flags, mode_t mode)
{
	return io->ops->open(io, dirfd, name, flags | O_CLOEXEC, mode);
}

int st_close(struct st_io *io, int fd)
{
	return io->ops->close(io, fd);
}

int st_lock(struct st_io *io, int fd)
{
	return io->ops->lock(io, fd);
}

int st_chmod(struct st_io *io, int fd, mode_t mode)
{
	return io->ops->chmod(io, fd, mode);
}

int st_chown(struct st_io *io, int fd, uid_t uid, gid_t gid)
{
	return io->ops->chown(io, fd, uid, gid);
}

int st_allocate(struct st_io *io, int fd, uint64_t length)
{
	return io->ops->allocate(io, fd, length);
}

int st_truncate(struct st_io *io, int fd, uint64_t length)
{
	return io->ops->truncate(io, fd, length);
}

int st_sync(struct st_io *io, int fd)
{
	return io->ops->sync(io, fd);
}

int st_sync_directory(struct st_io *io, int dirfd)
{
	return io->ops->sync_directory(io, dirfd);
}

int st_rename(struct st_io *io, int dirfd, const char *from, int to_dirfd, const char *to)
{
	return io->ops->rename(io, dirfd, from, to_dirfd, to);
}

int st_mkdir(struct st_io *io, int dirfd, const char *name, mode_t mode)
{
	return io->ops->mkdir(io, dirfd, name, mode);
}

int st_unlink(struct st_io *io, int dirfd, const char *name)
{
	return io->ops->unlink(io, dirfd, name);
}

/* Takes O_DIRECT off a descriptor. True if it was on. */
static bool clear_direct(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || !(flags & O_DIRECT))
		return false;
	return fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

int st_read(struct st_io *io, int fd, void *buf, uint64_t length, uint64_t offset)
{
	uint64_t done = 0, seen = 0;
	unsigned stalls = 0;
	uint8_t *bounce;
	int ret = 0;

	if (length > INT64_MAX - ST_ALIGN || offset > INT64_MAX - ST_ALIGN - length)
		return -EOVERFLOW;
	if (!length)
		return 0;
	bounce = aligned_alloc(ST_ALIGN, BOUNCE_BYTES);
	if (!bounce)
		return -ENOMEM;

	/* done is what was copied out; each round reads whole ST_ALIGN units
	 * around it, so a short count costs a few bytes read twice. */
	while (done < length) {
		uint64_t from = (offset + done) & ~(uint64_t)(ST_ALIGN - 1);
		uint64_t skip = offset + done - from;
		uint64_t want = skip + (length - done);
		uint64_t moved;
		int64_t got;

		want = (want + ST_ALIGN - 1) & ~(uint64_t)(ST_ALIGN - 1);
		if (want > BOUNCE_BYTES)
			want = BOUNCE_BYTES;
		got = io->ops->read(io, fd, bounce, want, from);
		if ((got == -EINTR || got == -EAGAIN) && ++stalls < 100) {
			st_nap(stalls > 8 ? 1000000 : 0);
			continue;
		}
		if ((got == -EINVAL || got == -EOPNOTSUPP) && clear_direct(fd))
			continue;
		if (got < 0) {
			ret = (int)got;
			break;
		}
		/* Nothing beyond what an earlier round saw is the end of the file. */
		if (from + (uint64_t)got <= offset + seen) {
			ret = ST_ETRUNCATED;
			break;
		}
		moved = (uint64_t)got - skip;
		if (moved > length - done)
			moved = length - done;
		memcpy((uint8_t *)buf + done, bounce + skip, moved);
		done += moved;
		seen = done;
		stalls = 0;
	}
	free(bounce);
	return ret;
}

void st_request_trim(struct st_request *request, uint64_t length)
{
	uint64_t left = length;
	unsigned i;

	if (length >= request->length)
		return;
	for (i = 0; i < request->iov_count && left; i++) {
		if (request->iov[i].iov_len > left)
			request->iov[i].iov_len = left;
		left -= request->iov[i].iov_len;
	}
	request->iov_count = i;
	request->length = length;
}

void st_list_init(struct st_request_list *list)
{
	list->first = NULL;
	list->last = &list->first;
}

void st_list_push(struct st_request_list *list, struct st_request *request)
{
	request->next = NULL;
	*list->last = request;
	list->last = &request->next;
}

struct st_request *st_list_pop(struct st_request_list *list)
{
	struct st_request *request = list->first;

	if (!request)
		return NULL;
	list->first = request->next;
	if (!list->first)
		list->last = &list->first;
	return request;
}

uint64_t st_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void st_nap(uint64_t ns)
{
	struct timespec length = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};

	if (ns)
		nanosleep(&length, NULL);
}
