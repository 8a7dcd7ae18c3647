/* worker.c: one thread of a run: take a job, gather or read, checksum,
 * submit, look at what came back. It shares nothing with the other workers
 * but the counter that hands out jobs and, rarely, the run's lock. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "extents.h"
#include "run.h"
#include "slots.h"

/* Copy and checksum go over the data in slices of this, so that the second
 * finds in cache what the first touched. */
#define SLICE_BYTES (128u << 10)

/* A transfer that makes no progress is asked for again this often before its
 * answer is believed; from the tenth on with a pause of STALL_NS. */
#define STALLS_MAX 100u
#define STALLS_EAGER 8u
#define STALL_NS 1000000u

/* A job between its beginning and its last completion. */
struct flight {
	struct st_request request; /* first: the queue hands this back */
	struct iovec iov[ST_IOVECS_MAX];
	uint64_t job;
	uint8_t *slot;     /* NULL: the caller's memory is used itself */
	uint8_t *own_slot; /* the slot that belongs to this flight */
	int slot_index;
	uint64_t total;  /* bytes to ask for, padding included */
	uint64_t needed; /* bytes that make it complete */
	uint64_t done;   /* where the transfer in flight began */
	uint64_t seen;   /* the furthest byte that any transfer reached */
	unsigned stalls;
	bool hashed;      /* digest is that of the whole job */
	bool second_look; /* read again because the checksum did not match */
	uint8_t digest[ST_DIGEST_BYTES];
	struct flight *next_free;
};

struct worker {
	struct st_run *run;
	struct st_queue *queue;
	struct st_slots slots;
	struct st_ferry ferry;
	struct st_hash hash;
	struct flight *flights, *free;
	unsigned in_flight;
	bool registered;
	struct st_stats stats;
};

enum landing { LANDED, FLY_ON };

static const struct st_job *job_of(const struct worker *self, const struct flight *flight)
{
	return &self->run->plan->jobs[flight->job];
}

static struct flight *take_flight(struct worker *self)
{
	struct flight *flight = self->free;

	self->free = flight->next_free;
	return flight;
}

static void give_flight(struct worker *self, struct flight *flight)
{
	flight->next_free = self->free;
	self->free = flight;
}

/* Records that a job failed, and ends the run unless it was told to go on. */
static void fail(struct worker *self, const struct flight *flight, int code, int detail, uint64_t offset)
{
	const struct st_plan *plan = self->run->plan;
	struct st_failure failure = {
		.code = code,
		.detail = detail,
		.file = job_of(self, flight)->file,
		.job = flight->job,
		.offset = job_of(self, flight)->offset + offset,
	};

	plan->results[flight->job].code = code;
	if (plan->direction == ST_READ && plan->keep_going && code != ST_ERING)
		return;
	st_run_fail(self->run, &failure);
}

static void succeed(struct worker *self, const struct flight *flight)
{
	struct st_result *result = &self->run->plan->results[flight->job];
	uint64_t length = job_of(self, flight)->length;

	result->code = 0;
	memcpy(result->digest, flight->digest, ST_DIGEST_BYTES);
	if (!flight->slot)
		self->stats.zero_copy_bytes += length;
	atomic_fetch_add_explicit(&self->run->bytes, length, memory_order_relaxed);
}

static bool next_job(struct worker *self, uint64_t *job)
{
	struct st_run *run = self->run;

	if (st_run_stopped(run))
		return false;
	*job = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
	return *job < run->plan->jobs_count;
}

static void begin(struct worker *self, struct flight *flight, uint64_t job_index)
{
	const struct st_run *run = self->run;
	const struct st_job *job = &run->plan->jobs[job_index];
	/* As the plan saw it: whether there are slots was decided from that. */
	bool borrows = st_job_borrows(run->plan, job, run->plan->files[job->file].direct);

	flight->job = job_index;
	flight->slot = borrows ? NULL : flight->own_slot;
	flight->needed = flight->total = job->length;
	if (run->plan->direction == ST_WRITE)
		flight->needed = flight->total = st_round_up(job->length, ST_ALIGN);
	else if (flight->slot)
		flight->total = st_round_up(job->length, ST_ALIGN);
	flight->done = flight->seen = 0;
	flight->stalls = 0;
	flight->hashed = false;
	flight->second_look = false;
	memset(flight->digest, 0, sizeof(flight->digest));
}

/* Asks for what is left of a flight. When the queue fails the job fails, and
 * the flight is free again. */
static void fly(struct worker *self, struct flight *flight)
{
	struct st_run *run = self->run;
	const struct st_plan *plan = run->plan;
	const struct st_job *job = job_of(self, flight);
	struct st_request *request = &flight->request;
	int ret;

	request->op = plan->direction == ST_WRITE ? ST_OP_WRITE : ST_OP_READ;
	request->fd = plan->files[job->file].fd;
	request->direct = atomic_load(&run->files[job->file].direct);
	request->offset = job->offset + flight->done;
	request->length = flight->total - flight->done;
	request->iov = flight->iov;
	request->buffer = -1;
	if (flight->slot) {
		flight->iov[0] =
			(struct iovec){.iov_base = flight->slot + flight->done, .iov_len = request->length};
		request->iov_count = 1;
		if (self->registered)
			request->buffer = flight->slot_index;
	} else {
		request->iov_count = st_extents_iov(&plan->extents[job->extent_first], flight->done,
			request->length, flight->iov, ST_IOVECS_MAX);
	}
	st_request_trim(request, ST_TRANSFER_MAX);
	self->stats.transfers++;
	ret = run->io->ops->submit(self->queue, request);
	if (ret < 0) {
		fail(self, flight, ST_ERING, ret, flight->done);
		give_flight(self, flight);
		return;
	}
	self->in_flight++;
}

/* O_DIRECT was accepted at open and refused at a transfer: buffered from now
 * on. Whoever comes second finds it done. */
static int drop_direct(struct worker *self, const struct flight *flight)
{
	struct st_run *run = self->run;
	uint32_t file = job_of(self, flight)->file;
	int ret = 0;

	pthread_mutex_lock(&run->lock);
	if (atomic_load(&run->files[file].direct)) {
		int fd = run->plan->files[file].fd;
		int flags = fcntl(fd, F_GETFL);

		if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_DIRECT) < 0)
			ret = -errno;
		atomic_store(&run->files[file].direct, false);
		run->stats.buffered_files++;
	}
	pthread_mutex_unlock(&run->lock);
	return ret;
}

/* Looks at what a transfer answered: LANDED, FLY_ON or an error. */
static int look(struct worker *self, struct flight *flight)
{
	const struct st_run *run = self->run;
	const struct st_open_file *file = &run->files[job_of(self, flight)->file];
	int64_t moved = flight->request.result;
	bool reads = flight->request.op == ST_OP_READ;
	uint64_t reached;

	if (moved == -EINTR || moved == -EAGAIN) {
		if (++flight->stalls > STALLS_MAX)
			return (int)moved;
		if (flight->stalls > STALLS_EAGER)
			st_nap(STALL_NS);
		self->stats.retries++;
		return FLY_ON;
	}
	if ((moved == -EINVAL || moved == -EOPNOTSUPP) && flight->request.direct) {
		int ret = drop_direct(self, flight);

		return ret < 0 ? ret : FLY_ON;
	}
	if (moved < 0)
		return (int)moved;

	reached = flight->done + (uint64_t)moved;
	if (reached >= flight->needed)
		return LANDED;
	/* Nothing new: the end of the file for a read. For a write it is a drive
	 * that takes no bytes and gives no reason. */
	if (reached <= flight->seen)
		return reads ? ST_ETRUNCATED : -EIO;
	flight->seen = reached;
	flight->stalls = 0;
	self->stats.retries++;
	/* O_DIRECT goes on from an aligned point only, in the file and in memory. */
	if (flight->request.direct) {
		uint64_t align = file->offset_align > file->mem_align ? file->offset_align : file->mem_align;

		reached -= reached % (align < ST_ALIGN ? align : ST_ALIGN);
	}
	flight->done = reached;
	return FLY_ON;
}

/* The checksum of memory that cannot change. False: the run stopped meanwhile. */
static bool hash_borrowed(struct worker *self, struct flight *flight)
{
	const struct st_run *run = self->run;
	const struct st_job *job = job_of(self, flight);
	struct st_cursor cursor = {.extent = &run->plan->extents[job->extent_first]};
	uint64_t left = job->length;

	run->hasher->reset(&self->hash, job->seed);
	while (left) {
		uint64_t piece = left < SLICE_BYTES ? left : SLICE_BYTES;
		const uint8_t *from = st_cursor_next(&cursor, &piece);

		run->hasher->update(&self->hash, from, piece);
		left -= piece;
		if (st_run_stopped(self->run))
			return false;
	}
	run->hasher->digest(&self->hash, flight->digest);
	return true;
}

/* Copies a job into its slot and takes the checksum of the copy, never of the
 * source: what is written is what was summed, even if another thread trains
 * on the tensor meanwhile. 0, -errno, or ST_ECANCELED when the run stopped. */
static int fill_slot(struct worker *self, struct flight *flight)
{
	const struct st_run *run = self->run;
	const struct st_job *job = job_of(self, flight);
	struct st_cursor cursor = {.extent = &run->plan->extents[job->extent_first]};
	struct st_ferry *ferry = job->flags & ST_JOB_CAREFUL ? &self->ferry : NULL;
	bool sums = job->flags & ST_JOB_CHECKSUM;
	uint64_t at = 0;

	if (sums)
		run->hasher->reset(&self->hash, job->seed);
	while (at < job->length) {
		uint64_t piece = job->length - at < SLICE_BYTES ? job->length - at : SLICE_BYTES;
		int ret = st_gather(&cursor, flight->slot + at, piece, ferry);

		if (ret < 0)
			return ret;
		if (sums)
			run->hasher->update(&self->hash, flight->slot + at, piece);
		at += piece;
		if (st_run_stopped(self->run))
			return ST_ECANCELED;
	}
	memset(flight->slot + at, 0, flight->total - at);
	if (sums)
		run->hasher->digest(&self->hash, flight->digest);
	return 0;
}

static void land_write(struct worker *self)
{
	struct st_run *run = self->run;
	struct flight *flight = (struct flight *)run->io->ops->wait(self->queue);
	const struct st_job *job = job_of(self, flight);
	int ret = look(self, flight);

	self->in_flight--;
	if (ret == FLY_ON && !st_run_stopped(run)) {
		fly(self, flight);
		return;
	}
	if (ret < 0) {
		fail(self, flight, ret, 0, flight->done);
	} else if (ret == LANDED && flight->hashed) {
		if (!flight->request.direct)
			run->io->ops->write_back(run->io, flight->request.fd, job->offset, flight->total);
		succeed(self, flight);
	}
	give_flight(self, flight);
}

static void write_jobs(struct worker *self)
{
	uint64_t job_index;

	for (;;) {
		struct flight *flight;

		while (!self->free)
			land_write(self);
		if (!next_job(self, &job_index))
			break;
		flight = take_flight(self);
		begin(self, flight, job_index);
		if (flight->slot) {
			int ret = fill_slot(self, flight);

			if (ret < 0) {
				if (ret != ST_ECANCELED)
					fail(self, flight, ret, 0, 0);
				give_flight(self, flight);
				continue;
			}
			flight->hashed = true;
			fly(self, flight);
		} else {
			/* The drive works while the sum is taken. With a synchronous
			 * engine nothing is gained and nothing lost. */
			unsigned before = self->in_flight;
			bool sums = job_of(self, flight)->flags & ST_JOB_CHECKSUM;

			flight->hashed = !sums;
			fly(self, flight);
			if (sums && self->in_flight > before)
				flight->hashed = hash_borrowed(self, flight);
		}
	}
	while (self->in_flight)
		land_write(self);
}

/* Hands out what was read: to the extents, summed on the way. Checksum first,
 * copy second: the slot is ours, nobody changes it between the two. */
static bool empty_slot(struct worker *self, struct flight *flight)
{
	const struct st_run *run = self->run;
	const struct st_job *job = job_of(self, flight);
	struct st_cursor cursor = {.extent = &run->plan->extents[job->extent_first]};
	bool sums = job->flags & ST_JOB_CHECKSUM;
	uint64_t at = 0;

	if (sums)
		run->hasher->reset(&self->hash, job->seed);
	while (at < job->length) {
		uint64_t piece = job->length - at < SLICE_BYTES ? job->length - at : SLICE_BYTES;

		if (sums)
			run->hasher->update(&self->hash, flight->slot + at, piece);
		st_scatter(&cursor, flight->slot + at, piece);
		at += piece;
		if (st_run_stopped(self->run))
			return false;
	}
	if (sums)
		run->hasher->digest(&self->hash, flight->digest);
	return true;
}

/* The wrong bytes may have come from a bad transfer and not from the drive:
 * look once more, and not into the page cache. */
static void look_again(struct worker *self, struct flight *flight)
{
	const struct st_job *job = job_of(self, flight);

	if (!flight->request.direct)
		posix_fadvise(
			flight->request.fd, (off_t)job->offset, (off_t)flight->total, POSIX_FADV_DONTNEED);
	flight->second_look = true;
	flight->done = flight->seen = 0;
	self->stats.retries++;
	fly(self, flight);
}

static void land_read(struct worker *self)
{
	struct st_run *run = self->run;
	struct flight *flight = (struct flight *)run->io->ops->wait(self->queue);
	const struct st_job *job = job_of(self, flight);
	int ret = look(self, flight);

	self->in_flight--;
	if (ret == FLY_ON && !st_run_stopped(run)) {
		fly(self, flight);
		return;
	}
	if (ret < 0) {
		fail(self, flight, ret, 0, flight->done);
	} else if (ret == LANDED && !st_run_stopped(run)) {
		bool sums = job->flags & ST_JOB_CHECKSUM;
		bool whole = flight->slot ? empty_slot(self, flight) : !sums || hash_borrowed(self, flight);

		if (whole && sums && memcmp(flight->digest, job->digest, ST_DIGEST_BYTES)) {
			if (!flight->second_look) {
				look_again(self, flight);
				return;
			}
			memcpy(run->plan->results[flight->job].digest, flight->digest, ST_DIGEST_BYTES);
			fail(self, flight, ST_ECORRUPT, 0, 0);
		} else if (whole) {
			succeed(self, flight);
		}
	}
	give_flight(self, flight);
}

static void read_jobs(struct worker *self)
{
	bool more = true;

	for (;;) {
		while (more && self->free) {
			uint64_t job_index;
			struct flight *flight;

			more = next_job(self, &job_index);
			if (!more)
				break;
			flight = take_flight(self);
			begin(self, flight, job_index);
			fly(self, flight);
		}
		if (!self->in_flight)
			break;
		land_read(self);
	}
}

/* Registered slots save the kernel from pinning their pages for each
 * transfer. Pinning them once costs about one use of each, so a run too small
 * to use every slot goes without. */
static void register_slots(struct worker *self)
{
	struct st_run *run = self->run;
	const struct st_shape *shape = &run->shape;
	struct iovec *buffers;
	int ret;

	if (!run->plan->register_buffers || !run->io->ops->queue_register || !shape->slot_bytes ||
		shape->slot_jobs < (uint64_t)shape->workers_count * shape->depth)
		return;
	buffers = calloc(shape->depth, sizeof(*buffers));
	if (!buffers)
		return;
	for (unsigned i = 0; i < shape->depth; i++)
		buffers[i] = (struct iovec){
			.iov_base = self->slots.base + i * shape->slot_bytes, .iov_len = shape->slot_bytes};
	ret = run->io->ops->queue_register(self->queue, buffers, shape->depth);
	free(buffers);
	self->registered = ret == 0;
	if (ret < 0)
		self->stats.register_error = (uint32_t)-ret;
	else
		self->stats.registered_workers = 1;
}

static int open_flights(struct worker *self)
{
	const struct st_shape *shape = &self->run->shape;
	int ret = st_slots_open(&self->slots, shape->depth, shape->slot_bytes);

	if (ret < 0)
		return ret;
	self->flights = calloc(shape->depth, sizeof(*self->flights));
	if (!self->flights) {
		st_slots_close(&self->slots);
		return -ENOMEM;
	}
	/* Given in falling order, taken in rising order. */
	for (unsigned i = shape->depth; i-- > 0;) {
		struct flight *flight = &self->flights[i];

		flight->slot_index = (int)i;
		if (self->slots.base)
			flight->own_slot = self->slots.base + i * shape->slot_bytes;
		give_flight(self, flight);
	}
	self->stats.slot_bytes = (uint64_t)shape->depth * shape->slot_bytes;
	return 0;
}

/* The last one out wakes whoever waits. */
static void leave(struct worker *self)
{
	struct st_run *run = self->run;

	pthread_mutex_lock(&run->lock);
	run->stats.zero_copy_bytes += self->stats.zero_copy_bytes;
	run->stats.transfers += self->stats.transfers;
	run->stats.retries += self->stats.retries;
	run->stats.wait_ns += self->stats.wait_ns;
	run->stats.work_ns += self->stats.work_ns;
	run->stats.registered_workers += self->stats.registered_workers;
	run->stats.slot_bytes += self->stats.slot_bytes;
	if (self->stats.register_error)
		run->stats.register_error = self->stats.register_error;
	if (--run->active == 0)
		pthread_cond_broadcast(&run->finished);
	pthread_mutex_unlock(&run->lock);
}

static void refuse(struct st_run *run, int code, int detail)
{
	pthread_mutex_lock(&run->lock);
	run->start_failure = (struct st_failure){.code = code, .detail = detail};
	if (code == ST_ERING)
		run->stats.rings_refused++;
	pthread_mutex_unlock(&run->lock);
}

void *st_worker_main(void *arg)
{
	struct st_run *run = arg;
	struct worker self = {.run = run};
	uint64_t start = st_now_ns();
	int ret;

	ret = run->io->ops->queue_open(run->io, run->shape.depth, &self.queue);
	if (ret < 0) {
		refuse(run, ST_ERING, ret);
		goto leave;
	}
	ret = open_flights(&self);
	if (ret < 0) {
		refuse(run, ret, 0);
		goto close_queue;
	}
	pthread_mutex_lock(&run->lock);
	run->ready++;
	pthread_mutex_unlock(&run->lock);
	register_slots(&self);

	if (run->plan->direction == ST_WRITE)
		write_jobs(&self);
	else
		read_jobs(&self);

	self.stats.wait_ns = self.queue->wait_ns;
	self.stats.work_ns = st_now_ns() - start - self.stats.wait_ns;
close_queue:
	/* Before the slots: registered memory is given back first. */
	run->io->ops->queue_close(self.queue);
	st_ferry_close(&self.ferry);
	free(self.flights);
	st_slots_close(&self.slots);
leave:
	leave(&self);
	return NULL;
}
