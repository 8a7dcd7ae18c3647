/* worker.c: one thread of a run: take a unit (a job, or a group of them),
 * gather or read, checksum, submit, look at what came back. It shares nothing
 * with the other workers but the counter that hands out units and, a few times
 * a transfer, the locks of run and file. */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* linux/ioprio.h, which not every system ships: class 3 is idle. */
#define IOPRIO_WHO_PROCESS_ 1
#define IOPRIO_IDLE_ (3 << 13)

static struct in_flight *take_unit(struct worker *self)
{
	struct in_flight *unit = self->free;

	self->free = unit->next_free;
	return unit;
}

static void give_unit(struct worker *self, struct in_flight *unit)
{
	unit->next_free = self->free;
	self->free = unit;
}

static bool next_unit(struct worker *self, uint64_t *index)
{
	struct st_run *run = self->run;

	if (st_run_stopped(run))
		return false;
	*index = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
	return *index < st_plan_units(run->plan);
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
		uint64_t piece = left < ST_SLICE_BYTES ? left : ST_SLICE_BYTES;
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
		uint64_t piece = st_slice_of(job->length, at);
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

/* The memory to save could not be read: no drive's fault, and nothing to go on with. */
static void fail_source(struct worker *self, struct flight *flight, int code)
{
	struct st_failure failure = {
		.code = code, .file = flight->file, .job = flight->job, .offset = flight->offset};

	result_of(self, flight)->code = code;
	st_run_fail(self->run, &failure);
}

/* A block to write has come to its end, well or not. */
static void end_write(struct worker *self, struct in_flight *unit)
{
	if (--unit->pending == 0)
		give_unit(self, unit);
}

static void land_write(struct worker *self)
{
	struct st_run *run = self->run;
	struct flight *flight = st_flight_land(self);
	int ret = st_flight_look(self, flight);

	if (ret == FLY_ON && !st_run_stopped(run)) {
		if (!st_flight_fly(self, flight))
			end_write(self, flight->unit);
		return;
	}
	/* What was to be written has its digest, also where it is not: the rest of
	 * its group can bring it back. */
	if (flight->hashed)
		memcpy(result_of(self, flight)->digest, flight->digest, ST_DIGEST_BYTES);
	if (ret < 0) {
		st_flight_fail(self, flight, ret, 0, flight->done);
	} else if (ret == LANDED && flight->hashed) {
		if (!flight->request.direct && !st_run_stopped(run))
			run->io->ops->write_back(run->io, flight->request.fd, flight->offset, flight->total);
		st_flight_succeed(self, flight);
	}
	end_write(self, flight->unit);
}

/* Sends all blocks of a unit on their way, but for those whose file is dead. */
static void fly_unit(struct worker *self, struct in_flight *unit)
{
	struct st_run *run = self->run;

	for (unsigned i = 0; i < unit->unit.inputs + unit->unit.outputs; i++) {
		struct flight *flight = &unit->flights[i];

		if (atomic_load(&run->files[flight->file].dead)) {
			memcpy(result_of(self, flight)->digest, flight->digest, ST_DIGEST_BYTES);
			atomic_fetch_add_explicit(
				&run->bytes, st_flight_payload(self, flight), memory_order_relaxed);
			continue;
		}
		if (st_flight_fly(self, flight))
			unit->pending++;
	}
}

/* The sum of a unit whose memory cannot change is taken while the drives work.
 * With a synchronous engine nothing is gained and nothing lost. */
static void hash_unit(struct worker *self, struct in_flight *unit)
{
	bool whole = hash_borrowed(self, &unit->flights[0]);

	for (unsigned i = 0; i < unit->unit.inputs + unit->unit.outputs; i++) {
		unit->flights[i].hashed = whole;
		memcpy(unit->flights[i].digest, unit->flights[0].digest, ST_DIGEST_BYTES);
		/* A dead file's block has its digest too. */
		memcpy(result_of(self, &unit->flights[i])->digest, unit->flights[0].digest, ST_DIGEST_BYTES);
	}
}

/* Copies a unit into its slots, sums and encodes it. 0, -errno, ST_ECANCELED. */
static int fill_unit(struct worker *self, struct in_flight *unit, struct flight **culprit)
{
	int ret;

	if (unit->unit.inputs + unit->unit.outputs > 1 && !unit->unit.copies)
		return st_group_fill(self, unit, culprit);
	*culprit = &unit->flights[0];
	ret = fill_slot(self, &unit->flights[0]);
	for (unsigned i = 0; i < unit->unit.inputs + unit->unit.outputs; i++) {
		unit->flights[i].hashed = true;
		memcpy(unit->flights[i].digest, unit->flights[0].digest, ST_DIGEST_BYTES);
	}
	return ret;
}

/* A unit that is copied first: then the drives may have it. */
static void write_copied(struct worker *self, struct in_flight *unit)
{
	struct flight *culprit;
	int ret = fill_unit(self, unit, &culprit);

	if (ret == 0)
		fly_unit(self, unit);
	else if (ret != ST_ECANCELED)
		fail_source(self, culprit, ret);
}

/* A unit in memory that cannot change: the drives may have it at once. */
static void write_borrowed(struct worker *self, struct in_flight *unit)
{
	bool sums = job_of(self, &unit->flights[0])->flags & ST_JOB_CHECKSUM;

	for (unsigned i = 0; i < unit->unit.inputs + unit->unit.outputs; i++)
		unit->flights[i].hashed = !sums;
	fly_unit(self, unit);
	if (sums)
		hash_unit(self, unit);
}

static void write_units(struct worker *self)
{
	uint64_t index;

	for (;;) {
		struct in_flight *unit;

		while (!self->free)
			land_write(self);
		if (!next_unit(self, &index))
			break;
		unit = take_unit(self);
		st_unit_begin(self, unit, index);
		if (unit->flights[0].slot)
			write_copied(self, unit);
		else
			write_borrowed(self, unit);
		end_write(self, unit);
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
		uint64_t piece = st_slice_of(job->length, at);

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
static bool look_again(struct worker *self, struct flight *flight)
{
	if (!flight->request.direct)
		posix_fadvise(
			flight->request.fd, (off_t)flight->offset, (off_t)flight->total, POSIX_FADV_DONTNEED);
	flight->done = flight->seen = 0;
	flight->second_look = true;
	self->stats.retries++;
	return st_flight_fly(self, flight);
}

/* A block to read has come to its end, well or not; the last one of a group
 * makes its outputs. */
static void end_read(struct worker *self, struct in_flight *unit)
{
	if (--unit->pending)
		return;
	if (unit->unit.outputs && !st_run_stopped(self->run)) {
		if (unit->input_failed)
			for (unsigned i = 0; i < unit->unit.outputs; i++)
				result_of(self, &unit->flights[unit->unit.inputs + i])->code = ST_EINPUT;
		else
			st_group_recover(self, unit);
	}
	give_unit(self, unit);
}

/* A place failed: goes on to the next copy, if there is one. True: on its way. */
static bool try_elsewhere(struct worker *self, struct flight *flight, int code, uint64_t offset)
{
	struct st_result *result = result_of(self, flight);

	if (job_of(self, flight)->copies_count) {
		flight->failed_bits |= 1u << flight->place;
		if (!flight->failed_code)
			flight->failed_code = code;
		result->failed_copies = flight->failed_bits;
		result->failed_code = flight->failed_code;
		st_flight_start_over(flight);
		if (!st_run_stopped(self->run) && st_flight_choose_place(self, flight))
			return st_flight_fly(self, flight);
		code = flight->failed_code;
	}
	st_flight_fail(self, flight, code, 0, offset);
	return false;
}

/* What a transfer brought. True: the block is still on its way. */
static bool landed_read(struct worker *self, struct flight *flight, int ret)
{
	struct st_run *run = self->run;
	const struct st_job *job = job_of(self, flight);
	bool sums = job->flags & ST_JOB_CHECKSUM;
	bool whole;

	if (ret < 0)
		return try_elsewhere(self, flight, ret, flight->done);
	if (ret != LANDED || st_run_stopped(run))
		return false;
	whole = flight->slot ? empty_slot(self, flight) : !sums || hash_borrowed(self, flight);
	if (whole && sums && memcmp(flight->digest, job->digest, ST_DIGEST_BYTES)) {
		if (!flight->second_look)
			return look_again(self, flight);
		memcpy(result_of(self, flight)->digest, flight->digest, ST_DIGEST_BYTES);
		return try_elsewhere(self, flight, ST_ECORRUPT, 0);
	}
	if (whole)
		st_flight_succeed(self, flight);
	return false;
}

static void land_read(struct worker *self)
{
	struct flight *flight = st_flight_land(self);
	int ret = st_flight_look(self, flight);
	bool on_its_way;

	if (ret == FLY_ON && !st_run_stopped(self->run))
		on_its_way = st_flight_fly(self, flight);
	else
		on_its_way = landed_read(self, flight, ret);
	if (!on_its_way)
		end_read(self, flight->unit);
}

static void read_units(struct worker *self)
{
	bool more = true;

	for (;;) {
		while (more && self->free) {
			uint64_t index;
			struct in_flight *unit;

			more = next_unit(self, &index);
			if (!more)
				break;
			unit = take_unit(self);
			st_unit_begin(self, unit, index);
			for (unsigned i = 0; i < unit->unit.inputs; i++)
				if (st_flight_fly(self, &unit->flights[i]))
					unit->pending++;
			end_read(self, unit);
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

	unsigned count = shape->depth * shape->unit_slots;

	if (!run->plan->register_buffers || !run->io->ops->queue_register || !count || count > UIO_MAXIOV ||
		shape->slots_wanted < (uint64_t)shape->workers_count * count)
		return;
	buffers = calloc(count, sizeof(*buffers));
	if (!buffers)
		return;
	for (unsigned i = 0; i < count; i++)
		buffers[i] = (struct iovec){
			.iov_base = self->slots.base + i * shape->slot_bytes, .iov_len = shape->slot_bytes};
	ret = run->io->ops->queue_register(self->queue, buffers, count);
	free(buffers);
	self->registered = ret == 0;
	if (ret < 0)
		self->stats.register_error = (uint32_t)-ret;
	else
		self->stats.registered_workers = 1;
}

static int open_units(struct worker *self)
{
	const struct st_shape *shape = &self->run->shape;
	unsigned slots = shape->depth * shape->unit_slots;
	int ret = st_slots_open(&self->slots, slots, shape->slot_bytes);

	if (ret < 0)
		return ret;
	self->units = calloc(shape->depth, sizeof(*self->units));
	self->flights = calloc((size_t)shape->depth * shape->unit_blocks, sizeof(*self->flights));
	self->output_hashes =
		aligned_alloc(alignof(struct st_hash), shape->unit_blocks * sizeof(*self->output_hashes));
	if (!self->units || !self->flights || !self->output_hashes)
		return -ENOMEM;
	/* Given in falling order, taken in rising order. */
	for (unsigned i = shape->depth; i-- > 0;) {
		struct in_flight *unit = &self->units[i];

		unit->flights = self->flights + (size_t)i * shape->unit_blocks;
		unit->slot_first = (int)(i * shape->unit_slots);
		if (self->slots.base)
			unit->slots = self->slots.base + (size_t)i * shape->unit_slots * shape->slot_bytes;
		give_unit(self, unit);
	}
	self->stats.slot_bytes = (uint64_t)slots * shape->slot_bytes;
	return 0;
}

static void close_units(struct worker *self)
{
	st_parity_close(&self->parity);
	free(self->output_hashes);
	free(self->flights);
	free(self->units);
	st_slots_close(&self->slots);
}

/* Behind everybody else's I/O, where the scheduler heeds it. */
static void lower_priority(struct worker *self)
{
	if (!self->run->plan->idle_priority)
		return;
	if (syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS_, 0, IOPRIO_IDLE_) < 0)
		self->stats.priority_error = (uint32_t)errno;
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
	if (self->stats.priority_error)
		run->stats.priority_error = self->stats.priority_error;
	/* Nothing of the caller's is touched from here on. */
	atomic_store(self->away, true);
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

	self.away = &run->away[atomic_fetch_add(&run->workers_numbered, 1)];
	lower_priority(&self);
	ret = run->io->ops->queue_open(run->io, run->shape.depth * run->shape.unit_blocks, &self.queue);
	if (ret < 0) {
		refuse(run, ST_ERING, ret);
		goto leave;
	}
	ret = open_units(&self);
	if (ret < 0) {
		refuse(run, ret, 0);
		goto close_queue;
	}
	pthread_mutex_lock(&run->lock);
	run->ready++;
	pthread_mutex_unlock(&run->lock);
	register_slots(&self);

	if (run->plan->direction == ST_WRITE)
		write_units(&self);
	else
		read_units(&self);

	self.stats.wait_ns = self.queue->wait_ns;
	self.stats.work_ns = st_now_ns() - start - self.stats.wait_ns;
close_queue:
	/* Before the slots: registered memory is given back first. */
	run->io->ops->queue_close(self.queue);
	st_ferry_close(&self.ferry);
	close_units(&self);
leave:
	leave(&self);
	return NULL;
}
