/* engine_posix.c: transfers as preadv and pwritev, for kernels and containers
 * that refuse io_uring. A transfer is done when submit returns; what runs in
 * parallel is workers. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "io.h"

struct posix_queue {
	struct st_queue queue;
	struct st_request_list done;
};

static void posix_free(struct st_io *io)
{
	free(io);
}

static int posix_queue_open(struct st_io *io, unsigned depth, struct st_queue **out)
{
	struct posix_queue *self = calloc(1, sizeof(*self));

	(void)depth;
	if (!self)
		return -ENOMEM;
	self->queue.io = io;
	st_list_init(&self->done);
	*out = &self->queue;
	return 0;
}

static int posix_submit(struct st_queue *queue, struct st_request *request)
{
	struct posix_queue *self = (struct posix_queue *)queue;
	uint64_t start = st_now_ns();
	ssize_t moved;

	if (request->op == ST_OP_WRITE)
		moved = pwritev(request->fd, request->iov, (int)request->iov_count, (off_t)request->offset);
	else
		moved = preadv(request->fd, request->iov, (int)request->iov_count, (off_t)request->offset);
	request->result = moved < 0 ? -errno : moved;
	queue->wait_ns += st_now_ns() - start;
	st_list_push(&self->done, request);
	return 0;
}

static struct st_request *posix_wait(struct st_queue *queue)
{
	return st_list_pop(&((struct posix_queue *)queue)->done);
}

static void posix_queue_close(struct st_queue *queue)
{
	free(queue);
}

static const struct st_io_ops posix_ops = {
	ST_NAMESPACE_OPS,
	.synchronous = true,
	.free = posix_free,
	.queue_open = posix_queue_open,
	.submit = posix_submit,
	.wait = posix_wait,
	.queue_close = posix_queue_close,
};

int st_io_posix(struct st_io **out)
{
	struct st_io *io = calloc(1, sizeof(*io));

	if (!io)
		return -ENOMEM;
	io->ops = &posix_ops;
	strcpy(io->name, "posix");
	*out = io;
	return 0;
}
