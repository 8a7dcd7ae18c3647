/* io.h: what an engine must offer to the workers, and what they ask of it.
 *
 * struct st_io_ops is the seam between the workers and a drive. Three files
 * fill it in: engine_uring.c, engine_posix.c, engine_fault.c. The calls that
 * change names or metadata are plain system calls in both real engines and
 * live in namespace.c. */
#ifndef STRIATE_IO_H
#define STRIATE_IO_H

#include <sys/uio.h>
#include "striate.h"

/* A transfer never asks for more than this: the kernel stops a little below
 * 2 GiB anyway, and a length must fit the 32 bits of a submission entry. */
#define ST_TRANSFER_MAX (1u << 30)

/* One read or write. The owner keeps it, its iovecs and the memory behind
 * them alive until the queue hands it back. */
struct st_request {
	uint32_t op; /* ST_OP_WRITE or ST_OP_READ */
	int fd;
	bool direct;     /* the descriptor had O_DIRECT when this was submitted */
	int buffer;      /* index of the registered buffer that holds iov[0], or -1 */
	uint64_t offset; /* in the file */
	uint64_t length; /* sum of the iovecs */
	struct iovec *iov;
	unsigned iov_count;

	int64_t result; /* bytes moved or -errno, once handed back */

	struct st_request *next; /* of the queue that holds it */
	size_t trace;            /* of the fault engine: its entry, */
	uint64_t limit;          /* the bytes it lets the answer show, */
	uint64_t late_ns;        /* and when the answer may be seen, 0: at once */
};

/* A list of finished requests, first in first out. */
struct st_request_list {
	struct st_request *first;
	struct st_request **last;
};

/* One worker's own way to a drive; used by the thread that opened it only. */
struct st_queue {
	struct st_io *io;
	uint64_t wait_ns; /* time spent waiting for the drive */
};

struct st_io_ops {
	/* submit blocks until the transfer is done: more in flight per worker is of no use. */
	bool synchronous;

	void (*free)(struct st_io *io);

	int (*open)(struct st_io *io, int dirfd, const char *name, int flags, mode_t mode);
	int (*close)(struct st_io *io, int fd);
	int (*lock)(struct st_io *io, int fd);
	int (*chmod)(struct st_io *io, int fd, mode_t mode);
	int (*chown)(struct st_io *io, int fd, uid_t uid, gid_t gid);
	int (*allocate)(struct st_io *io, int fd, uint64_t length);
	int (*truncate)(struct st_io *io, int fd, uint64_t length);
	int (*sync)(struct st_io *io, int fd);
	int (*sync_directory)(struct st_io *io, int dirfd);
	int (*rename)(struct st_io *io, int dirfd, const char *from, int to_dirfd, const char *to);
	int (*unlink)(struct st_io *io, int dirfd, const char *name);
	int (*mkdir)(struct st_io *io, int dirfd, const char *name, mode_t mode);
	/* One pread: bytes or -errno. */
	int64_t (*read)(struct st_io *io, int fd, void *buf, size_t length, uint64_t offset);
	/* Starts write-back of a buffered range and does not wait. Only a hint: no result. */
	void (*write_back)(struct st_io *io, int fd, uint64_t offset, uint64_t length);

	int (*queue_open)(struct st_io *io, unsigned depth, struct st_queue **out);
	/* 0 or -errno (the queue works unregistered then). NULL: nothing to register. */
	int (*queue_register)(struct st_queue *queue, const struct iovec *buffers, unsigned count);
	/* 0: the request is the queue's until wait hands it back. -errno: the
	 * queue itself failed, the request was not taken and the queue takes no more. */
	int (*submit)(struct st_queue *queue, struct st_request *request);
	/* The next finished request. Something must be in flight. Never fails:
	 * memory that the kernel may still touch cannot be given up. */
	struct st_request *(*wait)(struct st_queue *queue);
	void (*queue_close)(struct st_queue *queue); /* nothing in flight */
};

struct st_io {
	const struct st_io_ops *ops;
	char name[32];
};

/* Shortens a request to its first length bytes. */
void st_request_trim(struct st_request *request, uint64_t length);

void st_list_init(struct st_request_list *list);
void st_list_push(struct st_request_list *list, struct st_request *request);
struct st_request *st_list_pop(struct st_request_list *list); /* NULL when empty */

uint64_t st_now_ns(void); /* CLOCK_MONOTONIC */
void st_nap(uint64_t ns);

/* namespace.c */
int st_sys_open(struct st_io *io, int dirfd, const char *name, int flags, mode_t mode);
int st_sys_close(struct st_io *io, int fd);
int st_sys_lock(struct st_io *io, int fd);
int st_sys_chmod(struct st_io *io, int fd, mode_t mode);
int st_sys_chown(struct st_io *io, int fd, uid_t uid, gid_t gid);
int st_sys_allocate(struct st_io *io, int fd, uint64_t length);
int st_sys_truncate(struct st_io *io, int fd, uint64_t length);
int st_sys_sync(struct st_io *io, int fd);
int st_sys_sync_directory(struct st_io *io, int dirfd);
int st_sys_rename(struct st_io *io, int dirfd, const char *from, int to_dirfd, const char *to);
int st_sys_unlink(struct st_io *io, int dirfd, const char *name);
int st_sys_mkdir(struct st_io *io, int dirfd, const char *name, mode_t mode);
int64_t st_sys_read(struct st_io *io, int fd, void *buf, size_t length, uint64_t offset);
void st_sys_write_back(struct st_io *io, int fd, uint64_t offset, uint64_t length);

/* The namespace half of an ops table. */
#define ST_NAMESPACE_OPS                                                                                     \
	.open = st_sys_open, .close = st_sys_close, .lock = st_sys_lock, .chmod = st_sys_chmod,              \
	.chown = st_sys_chown, .allocate = st_sys_allocate, .truncate = st_sys_truncate,                     \
	.sync = st_sys_sync, .sync_directory = st_sys_sync_directory, .rename = st_sys_rename,               \
	.unlink = st_sys_unlink, .mkdir = st_sys_mkdir, .read = st_sys_read, .write_back = st_sys_write_back

#endif
