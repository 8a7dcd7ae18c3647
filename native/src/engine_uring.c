/* engine_uring.c: transfers through one io_uring per worker, made in the
 * worker's own thread. Written for liburing 2.3 and kernels from 5.1 on: only
 * vectored and fixed-buffer operations are used, which all of them know. */
#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>

#include "io.h"

/* How long submit keeps asking while the kernel is short of memory and
 * nothing of ours is in flight that could free some. */
#define STARVED_MAX_NS (5ull * 1000000000u)
#define POLL_NS 500000u
/* The longest pause before asking again for a ring that did not fit: 63 ms in all. */
#define ENOMEM_NAP_MAX_NS 32000000u

struct uring_queue {
	struct st_queue queue;
	struct io_uring ring;
	struct st_request_list done; /* seen while waiting for something else */
	unsigned in_flight;
	int broken; /* -errno of the call that the kernel refused */
};

static void uring_free(struct st_io *io)
{
	free(io);
}

static int ring_init(struct uring_queue *self, unsigned depth)
{
	int ret = -EINVAL;

	/* No interrupt of the worker for each completion: it looks when it has
	 * time. Linux 5.19; EINVAL before. */
#ifdef IORING_SETUP_COOP_TASKRUN
	ret = io_uring_queue_init(depth, &self->ring, IORING_SETUP_COOP_TASKRUN);
#endif
	if (ret == -EINVAL)
		ret = io_uring_queue_init(depth, &self->ring, 0);
	return ret;
}

static int uring_queue_open(struct st_io *io, unsigned depth, struct st_queue **out)
{
	struct uring_queue *self = calloc(1, sizeof(*self));
	int ret;

	if (!self)
		return -ENOMEM;
	self->queue.io = io;
	st_list_init(&self->done);
	/* Rings count against the user's locked memory, and a closed one gives its
	 * share back only a little later: the run before this one may be in the way. */
	for (uint64_t nap_ns = 1000000; (ret = ring_init(self, depth)) == -ENOMEM; nap_ns *= 2) {
		if (nap_ns > ENOMEM_NAP_MAX_NS)
			break;
		st_nap(nap_ns);
	}
	if (ret < 0) {
		free(self);
		return ret;
	}
	*out = &self->queue;
	return 0;
}

static int uring_queue_register(struct st_queue *queue, const struct iovec *buffers, unsigned count)
{
	struct uring_queue *self = (struct uring_queue *)queue;
	int ret = io_uring_register_buffers(&self->ring, buffers, count);

	return ret < 0 ? ret : 0;
}

/* Takes one completion off the ring, if there is one. */
static struct st_request *reap(struct uring_queue *self)
{
	struct st_request *request;
	struct io_uring_cqe *cqe;
	unsigned head, found = 0;

	io_uring_for_each_cqe(&self->ring, head, cqe)
	{
		found = 1;
		break;
	}
	if (!found)
		return NULL;
	request = io_uring_cqe_get_data(cqe);
	request->result = cqe->res;
	io_uring_cqe_seen(&self->ring, cqe);
	self->in_flight--;
	return request;
}

/* Waits for a completion. A ring that may no longer be entered still fills:
 * the kernel posts completions on our next return from any system call. */
static struct st_request *reap_wait(struct uring_queue *self)
{
	uint64_t start = st_now_ns();
	struct st_request *request;

	while (!(request = reap(self))) {
		struct io_uring_cqe *cqe;
		int ret;

		if (self->broken) {
			st_nap(POLL_NS);
			continue;
		}
		ret = io_uring_wait_cqe(&self->ring, &cqe);
		if (ret == -EAGAIN || ret == -EBUSY)
			st_nap(POLL_NS);
		else if (ret < 0 && ret != -EINTR)
			self->broken = ret;
	}
	self->queue.wait_ns += st_now_ns() - start;
	return request;
}

static int uring_submit(struct st_queue *queue, struct st_request *request)
{
	struct uring_queue *self = (struct uring_queue *)queue;
	uint64_t starved_ns = 0;
	struct io_uring_sqe *sqe;

	if (self->broken)
		return self->broken;
	sqe = io_uring_get_sqe(&self->ring);
	if (!sqe) /* each submit empties the ring's queue before it returns */
		return self->broken = -EBUSY;
	if (request->op == ST_OP_WRITE) {
		if (request->buffer >= 0)
			io_uring_prep_write_fixed(sqe, request->fd, request->iov[0].iov_base,
				(unsigned)request->length, request->offset, request->buffer);
		else
			io_uring_prep_writev(
				sqe, request->fd, request->iov, request->iov_count, request->offset);
	} else {
		if (request->buffer >= 0)
			io_uring_prep_read_fixed(sqe, request->fd, request->iov[0].iov_base,
				(unsigned)request->length, request->offset, request->buffer);
		else
			io_uring_prep_readv(
				sqe, request->fd, request->iov, request->iov_count, request->offset);
	}
	io_uring_sqe_set_data(sqe, request);

	for (;;) {
		int ret = io_uring_submit(&self->ring);

		if (ret > 0)
			break;
		if (ret == -EINTR)
			continue;
		if (ret != 0 && ret != -EAGAIN && ret != -EBUSY)
			return self->broken = ret;
		/* Out of memory, or completions are backed up: free some, then ask
		 * again. The entry stays in the ring and goes with the next call. */
		if (self->in_flight) {
			st_list_push(&self->done, reap_wait(self));
			if (self->broken)
				return self->broken;
			continue;
		}
		if (starved_ns >= STARVED_MAX_NS)
			return self->broken = ret ? ret : -EAGAIN;
		st_nap(POLL_NS);
		starved_ns += POLL_NS;
	}
	self->in_flight++;
	return 0;
}

static struct st_request *uring_wait(struct st_queue *queue)
{
	struct uring_queue *self = (struct uring_queue *)queue;
	struct st_request *request = st_list_pop(&self->done);

	return request ? request : reap_wait(self);
}

static void uring_queue_close(struct st_queue *queue)
{
	struct uring_queue *self = (struct uring_queue *)queue;

	io_uring_queue_exit(&self->ring);
	free(self);
}

static const struct st_io_ops uring_ops = {
	ST_NAMESPACE_OPS,
	.free = uring_free,
	.queue_open = uring_queue_open,
	.queue_register = uring_queue_register,
	.submit = uring_submit,
	.wait = uring_wait,
	.queue_close = uring_queue_close,
};

int st_io_uring(struct st_io **out)
{
	struct st_io *io = calloc(1, sizeof(*io));

	if (!io)
		return -ENOMEM;
	io->ops = &uring_ops;
	strcpy(io->name, "uring");
	*out = io;
	return 0;
}
