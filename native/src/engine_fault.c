/* engine_fault.c: another engine, with faults from a script and a trace of
 * everything that was asked. For tests; one mutex guards all of it. */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io.h"

#define NO_TRACE SIZE_MAX

struct fault_io {
	struct st_io io;
	struct st_io_ops ops; /* a copy: it takes on the abilities of inner */
	struct st_io *inner;

	pthread_mutex_t lock; /* of all below */
	struct st_fault *faults;
	uint64_t *seen; /* operations that each fault matched so far */
	size_t faults_count;
	bool cut;

	bool record_data;
	struct st_trace *traces;
	size_t traces_count, traces_max;
};

struct fault_queue {
	struct st_queue queue;
	struct st_queue *inner;
	struct st_request_list done; /* answered here, never seen by inner */
	struct st_request_list late; /* answered by inner, not to be seen yet */
	unsigned inner_in_flight;
};

/* What is to happen to one operation. */
struct verdict {
	bool suppressed; /* does nothing */
	int result;      /* the answer then */
	bool limited;
	uint64_t limit;   /* bytes that a transfer may answer */
	uint64_t late_ns; /* 0: at once */
	size_t trace;
};

/* The path of a descriptor; "" if it has none. */
static void path_of(int fd, char path[PATH_MAX])
{
	char link[64];
	ssize_t length;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, path, PATH_MAX - 1);
	path[length < 0 ? 0 : length] = 0;
}

static uint64_t hang_ns(const struct st_fault *fault)
{
	return (fault->value ? fault->value : 3600u * 1000u) * 1000000u;
}

static char *copy_name(const char *name)
{
	return name ? strdup(name) : NULL;
}

/* Decides about an operation and records it. Counting and cutting are one
 * step under the lock, so what comes "after" a power cut is well defined. */
static struct verdict judge(
	struct fault_io *self, const struct st_trace *asked, const struct st_request *request)
{
	struct verdict verdict = {.trace = NO_TRACE};
	struct st_trace entry = *asked;
	char path[PATH_MAX];
	uint8_t *data = NULL;

	path_of(asked->fd, path);
	pthread_mutex_lock(&self->lock);
	for (size_t i = 0; i < self->faults_count; i++) {
		const struct st_fault *fault = &self->faults[i];
		uint64_t nth;

		if (fault->op != ST_OP_ANY && fault->op != asked->op)
			continue;
		if (strncmp(path, fault->drive, strlen(fault->drive)) != 0)
			continue;
		nth = self->seen[i]++;
		if (nth < fault->nth || (fault->count && nth - fault->nth >= fault->count))
			continue;
		switch (fault->kind) {
		case ST_FAULT_ERROR:
			verdict.suppressed = true;
			verdict.result = -(int)fault->value;
			break;
		case ST_FAULT_SHORT:
			verdict.limited = true;
			verdict.limit = fault->value;
			break;
		case ST_FAULT_CUT:
			self->cut = true;
			break;
		case ST_FAULT_HANG:
			verdict.late_ns = st_now_ns() + hang_ns(fault);
			break;
		}
	}
	if (self->cut) {
		verdict.suppressed = true;
		verdict.result = -EIO;
	}

	if (self->record_data && request && asked->op == ST_OP_WRITE) {
		uint64_t done = 0;

		data = malloc(request->length);
		for (unsigned i = 0; data && i < request->iov_count; i++) {
			memcpy(data + done, request->iov[i].iov_base, request->iov[i].iov_len);
			done += request->iov[i].iov_len;
		}
	}
	entry.name = copy_name(asked->name);
	entry.to = copy_name(asked->to);
	entry.where = copy_name(*path ? path : NULL);
	entry.data = data;
	entry.result = verdict.result;
	if (self->traces_count == self->traces_max) {
		size_t more = self->traces_max ? 2 * self->traces_max : 64;
		struct st_trace *grown = realloc(self->traces, more * sizeof(*grown));

		if (!grown) /* a trace with a hole would let a test pass that must not */
			abort();
		self->traces = grown;
		self->traces_max = more;
	}
	verdict.trace = self->traces_count++;
	self->traces[verdict.trace] = entry;
	pthread_mutex_unlock(&self->lock);
	return verdict;
}

static int answer(struct fault_io *self, size_t trace, int64_t result)
{
	pthread_mutex_lock(&self->lock);
	self->traces[trace].result = (int32_t)result;
	pthread_mutex_unlock(&self->lock);
	return (int)result;
}

static struct fault_io *fault_of(struct st_io *io)
{
	return (struct fault_io *)io;
}

/* Waits until the answer may be given. */
static void linger(const struct verdict *verdict)
{
	while (verdict->late_ns && st_now_ns() < verdict->late_ns)
		st_nap(1000000u);
}

/* Judges *asked; unless that settles it, makes the call on inner and records its answer. */
#define FORWARD(io_, asked_, call_)                                                                          \
	({                                                                                                   \
		struct fault_io *self = fault_of(io_);                                                       \
		struct st_io *inner = self->inner;                                                           \
		const struct st_trace asked = asked_;                                                        \
		struct verdict verdict = judge(self, &asked, NULL);                                          \
		linger(&verdict);                                                                            \
		verdict.suppressed ? verdict.result : answer(self, verdict.trace, inner->ops->call_);        \
	})
#define ASKED(...) ((struct st_trace){__VA_ARGS__})

static int fault_open(struct st_io *io, int dirfd, const char *name, int flags, mode_t mode)
{
	return FORWARD(io,
		ASKED(.op = ST_OP_OPEN, .fd = dirfd, .name = name, .flags = (uint32_t)flags, .length = mode),
		open(inner, dirfd, name, flags, mode));
}

static int fault_close(struct st_io *io, int fd)
{
	struct fault_io *self = fault_of(io);
	const struct st_trace asked = ASKED(.op = ST_OP_CLOSE, .fd = fd);
	struct verdict verdict = judge(self, &asked, NULL);
	/* Always really closed: the kernel frees a descriptor even when close
	 * answers an error, and a dead machine holds neither files nor locks. */
	int ret = self->inner->ops->close(self->inner, fd);

	return verdict.suppressed ? verdict.result : answer(self, verdict.trace, ret);
}

static int fault_lock(struct st_io *io, int fd)
{
	return FORWARD(io, ASKED(.op = ST_OP_LOCK, .fd = fd), lock(inner, fd));
}

static int fault_chmod(struct st_io *io, int fd, mode_t mode)
{
	return FORWARD(io, ASKED(.op = ST_OP_CHMOD, .fd = fd, .flags = mode), chmod(inner, fd, mode));
}

static int fault_chown(struct st_io *io, int fd, uid_t uid, gid_t gid)
{
	return FORWARD(io, ASKED(.op = ST_OP_CHOWN, .fd = fd, .offset = uid, .length = gid),
		chown(inner, fd, uid, gid));
}

static int fault_allocate(struct st_io *io, int fd, uint64_t length)
{
	return FORWARD(
		io, ASKED(.op = ST_OP_ALLOCATE, .fd = fd, .length = length), allocate(inner, fd, length));
}

static int fault_truncate(struct st_io *io, int fd, uint64_t length)
{
	return FORWARD(
		io, ASKED(.op = ST_OP_TRUNCATE, .fd = fd, .length = length), truncate(inner, fd, length));
}

static int fault_sync(struct st_io *io, int fd)
{
	return FORWARD(io, ASKED(.op = ST_OP_SYNC, .fd = fd), sync(inner, fd));
}

static int fault_sync_directory(struct st_io *io, int dirfd)
{
	return FORWARD(io, ASKED(.op = ST_OP_SYNC_DIRECTORY, .fd = dirfd), sync_directory(inner, dirfd));
}

static int fault_rename(struct st_io *io, int dirfd, const char *from, int to_dirfd, const char *to)
{
	return FORWARD(io, ASKED(.op = ST_OP_RENAME, .fd = dirfd, .name = from, .to = to),
		rename(inner, dirfd, from, to_dirfd, to));
}

static int fault_mkdir(struct st_io *io, int dirfd, const char *name, mode_t mode)
{
	return FORWARD(io, ASKED(.op = ST_OP_MKDIR, .fd = dirfd, .name = name, .length = mode),
		mkdir(inner, dirfd, name, mode));
}

static int fault_unlink(struct st_io *io, int dirfd, const char *name)
{
	return FORWARD(io, ASKED(.op = ST_OP_UNLINK, .fd = dirfd, .name = name), unlink(inner, dirfd, name));
}

/* Direct transfers move whole ST_ALIGN units whatever they then answer. */
static uint64_t moved_for(uint64_t limit)
{
	return limit > UINT64_MAX - ST_ALIGN ? UINT64_MAX
					     : (limit + ST_ALIGN - 1) & ~(uint64_t)(ST_ALIGN - 1);
}

static int64_t fault_read(struct st_io *io, int fd, void *buf, size_t length, uint64_t offset)
{
	struct fault_io *self = fault_of(io);
	const struct st_trace asked = ASKED(.op = ST_OP_READ, .fd = fd, .offset = offset, .length = length);
	struct verdict verdict = judge(self, &asked, NULL);
	int64_t got;

	linger(&verdict);
	if (verdict.suppressed)
		return verdict.result;
	if (verdict.limited && !verdict.limit)
		return answer(self, verdict.trace, 0);
	if (verdict.limited && moved_for(verdict.limit) < length)
		length = moved_for(verdict.limit);
	got = self->inner->ops->read(self->inner, fd, buf, length, offset);
	if (verdict.limited && got > (int64_t)verdict.limit)
		got = (int64_t)verdict.limit;
	answer(self, verdict.trace, got);
	return got;
}

static void fault_write_back(struct st_io *io, int fd, uint64_t offset, uint64_t length)
{
	struct fault_io *self = fault_of(io);
	bool cut;

	pthread_mutex_lock(&self->lock);
	cut = self->cut;
	pthread_mutex_unlock(&self->lock);
	if (!cut)
		self->inner->ops->write_back(self->inner, fd, offset, length);
}

static int fault_queue_open(struct st_io *io, unsigned depth, struct st_queue **out)
{
	struct st_io *inner = fault_of(io)->inner;
	struct fault_queue *self = calloc(1, sizeof(*self));
	int ret;

	if (!self)
		return -ENOMEM;
	ret = inner->ops->queue_open(inner, depth, &self->inner);
	if (ret < 0) {
		free(self);
		return ret;
	}
	self->queue.io = io;
	st_list_init(&self->done);
	st_list_init(&self->late);
	*out = &self->queue;
	return 0;
}

static int fault_queue_register(struct st_queue *queue, const struct iovec *buffers, unsigned count)
{
	struct fault_queue *self = (struct fault_queue *)queue;

	return self->inner->io->ops->queue_register(self->inner, buffers, count);
}

static int fault_submit(struct st_queue *queue, struct st_request *request)
{
	struct fault_queue *self = (struct fault_queue *)queue;
	struct fault_io *io = fault_of(queue->io);
	const struct st_trace asked = ASKED(.op = request->op, .fd = request->fd, .flags = request->direct,
		.offset = request->offset, .length = request->length);
	struct verdict verdict = judge(io, &asked, request);
	int ret;

	request->trace = verdict.trace;
	request->limit = verdict.limited ? verdict.limit : UINT64_MAX;
	request->late_ns = verdict.late_ns;
	if (verdict.suppressed || request->limit == 0) {
		request->result = verdict.suppressed ? verdict.result : 0;
		st_list_push(request->late_ns ? &self->late : &self->done, request);
		return 0;
	}
	st_request_trim(request, moved_for(request->limit));
	ret = io->inner->ops->submit(self->inner, request);
	if (!ret)
		self->inner_in_flight++;
	queue->wait_ns = self->inner->wait_ns;
	if (ret < 0)
		answer(io, verdict.trace, ret);
	return ret;
}

/* The first late answer whose time has come. all_late: nothing else can be
 * waited for, so its time is. */
static struct st_request *pop_due(struct st_request_list *late, bool all_late)
{
	struct st_request *request = late->first;

	if (!request || (!all_late && st_now_ns() < request->late_ns))
		return NULL;
	while (st_now_ns() < request->late_ns)
		st_nap(1000000u);
	return st_list_pop(late);
}

static struct st_request *fault_wait(struct st_queue *queue)
{
	struct fault_queue *self = (struct fault_queue *)queue;
	struct fault_io *io = fault_of(queue->io);
	struct st_request *request;

	for (;;) {
		request = st_list_pop(&self->done);
		if (request)
			return request;
		request = pop_due(&self->late, !self->inner_in_flight);
		if (request)
			break;
		request = io->inner->ops->wait(self->inner);
		self->inner_in_flight--;
		queue->wait_ns = self->inner->wait_ns;
		if (!request->late_ns)
			break;
		/* It moved; the answer is what comes late. */
		st_list_push(&self->late, request);
	}
	if (request->result > 0 && (uint64_t)request->result > request->limit)
		request->result = (int64_t)request->limit;
	answer(io, request->trace, request->result);
	return request;
}

static void fault_queue_close(struct st_queue *queue)
{
	struct fault_queue *self = (struct fault_queue *)queue;

	self->inner->io->ops->queue_close(self->inner);
	free(self);
}

static void fault_free(struct st_io *io)
{
	struct fault_io *self = fault_of(io);

	for (size_t i = 0; i < self->traces_count; i++) {
		free((void *)self->traces[i].name);
		free((void *)self->traces[i].to);
		free((void *)self->traces[i].where);
		free((void *)self->traces[i].data);
	}
	free(self->traces);
	free(self->faults);
	free(self->seen);
	pthread_mutex_destroy(&self->lock);
	st_io_free(self->inner);
	free(self);
}

static const struct st_io_ops fault_ops = {
	.free = fault_free,
	.open = fault_open,
	.close = fault_close,
	.lock = fault_lock,
	.chmod = fault_chmod,
	.chown = fault_chown,
	.allocate = fault_allocate,
	.truncate = fault_truncate,
	.sync = fault_sync,
	.sync_directory = fault_sync_directory,
	.rename = fault_rename,
	.unlink = fault_unlink,
	.mkdir = fault_mkdir,
	.read = fault_read,
	.write_back = fault_write_back,
	.queue_open = fault_queue_open,
	.queue_register = fault_queue_register,
	.submit = fault_submit,
	.wait = fault_wait,
	.queue_close = fault_queue_close,
};

int st_io_fault(struct st_io **out, struct st_io *inner, const struct st_fault *faults, size_t faults_count,
	bool record_data)
{
	struct fault_io *self = calloc(1, sizeof(*self));

	if (!self)
		return -ENOMEM;
	/* calloc(0, ...) may be NULL: one more than needed. */
	self->faults = calloc(faults_count + 1, sizeof(*faults));
	self->seen = calloc(faults_count + 1, sizeof(*self->seen));
	if (!self->faults || !self->seen) {
		free(self->faults);
		free(self->seen);
		free(self);
		return -ENOMEM;
	}
	if (faults_count)
		memcpy(self->faults, faults, faults_count * sizeof(*faults));
	self->faults_count = faults_count;
	self->record_data = record_data;
	pthread_mutex_init(&self->lock, NULL);
	self->inner = inner;
	self->ops = fault_ops;
	self->ops.synchronous = inner->ops->synchronous;
	if (!inner->ops->queue_register)
		self->ops.queue_register = NULL;
	self->io.ops = &self->ops;
	snprintf(self->io.name, sizeof(self->io.name), "fault(%.16s)", inner->name);
	*out = &self->io;
	return 0;
}

static struct fault_io *fault_or_null(const struct st_io *io)
{
	return io->ops->open == fault_open ? (struct fault_io *)io : NULL;
}

size_t st_trace_count(const struct st_io *io)
{
	struct fault_io *self = fault_or_null(io);
	size_t count;

	if (!self)
		return 0;
	pthread_mutex_lock(&self->lock);
	count = self->traces_count;
	pthread_mutex_unlock(&self->lock);
	return count;
}

int st_trace_get(const struct st_io *io, size_t index, struct st_trace *out)
{
	struct fault_io *self = fault_or_null(io);
	int ret = -EINVAL;

	if (!self)
		return ret;
	pthread_mutex_lock(&self->lock);
	if (index < self->traces_count) {
		*out = self->traces[index];
		ret = 0;
	}
	pthread_mutex_unlock(&self->lock);
	return ret;
}
