/* namespace.c: the calls on names, metadata and durability, as plain system
 * calls: both real engines use them. Transfers of a run are not here. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"

/* The value of a system call as 0/descriptor or -errno, asked again after a signal. */
#define RETRY(call)                                                                                          \
	({                                                                                                   \
		int64_t ret_;                                                                                \
		do                                                                                           \
			ret_ = (call);                                                                       \
		while (ret_ < 0 && errno == EINTR);                                                          \
		ret_ < 0 ? -(int64_t)errno : ret_;                                                           \
	})

int st_sys_open(struct st_io *io, int dirfd, const char *name, int flags, mode_t mode)
{
	(void)io;
	return (int)RETRY(openat(dirfd, name, flags, mode));
}

int st_sys_close(struct st_io *io, int fd)
{
	(void)io;
	/* Linux frees the descriptor whatever the answer: asking again could close another's. */
	return close(fd) < 0 && errno != EINTR ? -errno : 0;
}

int st_sys_lock(struct st_io *io, int fd)
{
	(void)io;
	return (int)RETRY(flock(fd, LOCK_EX | LOCK_NB));
}

int st_sys_chmod(struct st_io *io, int fd, mode_t mode)
{
	(void)io;
	return (int)RETRY(fchmod(fd, mode));
}

int st_sys_chown(struct st_io *io, int fd, uid_t uid, gid_t gid)
{
	(void)io;
	return (int)RETRY(fchown(fd, uid, gid));
}

int st_sys_truncate(struct st_io *io, int fd, uint64_t length)
{
	(void)io;
	if (length > INT64_MAX)
		return -EFBIG;
	return (int)RETRY(ftruncate(fd, (off_t)length));
}

int st_sys_allocate(struct st_io *io, int fd, uint64_t length)
{
	int ret;

	if (length > INT64_MAX)
		return -EFBIG;
	if (!length) /* fallocate refuses it */
		return 0;
	/* Mode 0 also sets the size: KEEP_SIZE would leave every write an extending one. */
	ret = (int)RETRY(fallocate(fd, 0, 0, (off_t)length));
	/* The last two are what some network and user-space file systems answer to
	 * a mode they do not know; a real refusal meets ftruncate as well. */
	if (ret == -EOPNOTSUPP || ret == -ENOSYS || ret == -EINVAL || ret == -EPERM)
		ret = st_sys_truncate(io, fd, length);
	return ret;
}

int st_sys_sync(struct st_io *io, int fd)
{
	(void)io;
	/* Asked again after a signal only: what a failed sync could not write may be
	 * marked clean, and a second one would find nothing wrong. */
	return (int)RETRY(fsync(fd));
}

int st_sys_sync_directory(struct st_io *io, int dirfd)
{
	return st_sys_sync(io, dirfd);
}

int st_sys_rename(struct st_io *io, int dirfd, const char *from, int to_dirfd, const char *to)
{
	(void)io;
	return renameat(dirfd, from, to_dirfd, to) < 0 ? -errno : 0;
}

int st_sys_mkdir(struct st_io *io, int dirfd, const char *name, mode_t mode)
{
	(void)io;
	return mkdirat(dirfd, name, mode) < 0 ? -errno : 0;
}

int st_sys_unlink(struct st_io *io, int dirfd, const char *name)
{
	(void)io;
	return unlinkat(dirfd, name, 0) < 0 ? -errno : 0;
}

int64_t st_sys_read(struct st_io *io, int fd, void *buf, size_t length, uint64_t offset)
{
	ssize_t got = pread(fd, buf, length, (off_t)offset);

	(void)io;
	return got < 0 ? -errno : got;
}

void st_sys_write_back(struct st_io *io, int fd, uint64_t offset, uint64_t length)
{
	(void)io;
	sync_file_range(fd, (off_t)offset, (off_t)length, SYNC_FILE_RANGE_WRITE);
}
