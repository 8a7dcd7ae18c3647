/* worker.c: one thread of a run: take a unit (a job, or a group of them),
 * gather or read, checksum, submit, look at what came back. It shares nothing
 * with the other workers but the counter that hands out units and, a few times
 * a transfer, the locks of run and file. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "extents.h"
#include "parity.h"
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

/* A wait for the bandwidth looks at the run's end this often. */
#define PACE_NS 50000000u

/* linux/ioprio.h, which not every system ships: class 3 is idle. */
#define IOPRIO_WHO_PROCESS_ 1
#define IOPRIO_IDLE_ (3 << 13)

struct in_flight;

/* A block between its beginning and its last completion. */
struct flight {
	struct st_request request; /* first: the queue hands this back */
	struct iovec iov[ST_IOVECS_MAX];
	struct in_flight *unit;
	uint64_t job;
	uint32_t file;   /* where it is transferred to or from: the job's own place, */
	uint64_t offset; /* or that of a copy */
	uint8_t *slot;   /* NULL: the caller's memory is used itself */
	int slot_index;
	uint64_t total;  /* bytes to ask for, padding included */
	uint64_t needed; /* bytes that make it complete */
	uint64_t done;   /* where the transfer in flight began */
	uint64_t seen;   /* the furthest byte that any transfer reached */
	uint64_t since_ns;
	unsigned stalls;
	unsigned place;       /* 0: the job's own, i: copy i - 1 */
	uint32_t failed_bits; /* places that failed */
	int failed_code;
	bool output;
	bool hashed;      /* digest is that of the whole job */
	bool second_look; /* read again because the checksum did not match */
	uint8_t digest[ST_DIGEST_BYTES];
};

/* A unit between its beginning and the last completion of its blocks. */
struct in_flight {
	struct st_unit unit;
	struct flight *flights; /* unit_blocks of the shape */
	uint8_t *slots;         /* unit_slots of the shape, NULL: none */
	int slot_first;         /* index of the first, as registered */
	unsigned pending;       /* blocks that have not come to their end */
	bool input_failed;
	struct in_flight *next_free;
};

struct worker {
	struct st_run *run;
	struct st_queue *queue;
	atomic_bool *away;
	struct st_slots slots;
	struct st_ferry ferry;
	struct st_hash hash;
	struct st_hash *output_hashes;
	struct st_parity parity;
	struct flight *flights;
	struct in_flight *units, *free;
	unsigned in_flight; /* transfers */
	bool registered;
	struct st_stats stats;
};

enum landing { LANDED, FLY_ON };

static const struct st_job *job_of(const struct worker *self, const struct flight *flight)
{
	return &self->run->plan->jobs[flight->job];
}

static struct st_result *result_of(const struct worker *self, const struct flight *flight)
{
	return &self->run->plan->results[flight->job];
}

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

/* Records that a job failed, and ends the run unless it was told to go on. */
static void fail(struct worker *self, struct flight *flight, int code, int detail, uint64_t offset)
{
	struct st_run *run = self->run;
	struct st_failure failure = {
		.code = code,
		.detail = detail,
		.file = flight->file,
		.job = flight->job,
		.offset = flight->offset + offset,
	};

	result_of(self, flight)->code = code;
	if (!flight->output)
		flight->unit->input_failed = true;
	if (run->plan->keep_going && code != ST_ERING) {
		if (run->plan->direction == ST_WRITE)
			atomic_store(&run->files[flight->file].dead, true);
		return;
	}
	st_run_fail(run, &failure);
}

/* What of a job counts as progress: check blocks do not, nor what is read
 * only to compute something else. */
static uint64_t payload(const struct worker *self, const struct flight *flight)
{
	const struct st_plan *plan = self->run->plan;
	const struct st_job *job = job_of(self, flight);

	if (plan->direction == ST_WRITE)
		return flight->output ? 0 : job->length;
	if (flight->unit->unit.outputs && job->extents_count && !plan->extents[job->extent_first].addr)
		return 0;
	return job->length;
}

static void succeed(struct worker *self, const struct flight *flight)
{
	struct st_result *result = result_of(self, flight);

	result->code = 0;
	memcpy(result->digest, flight->digest, ST_DIGEST_BYTES);
	if (!flight->slot)
		self->stats.zero_copy_bytes += job_of(self, flight)->length;
	atomic_fetch_add_explicit(&self->run->bytes, payload(self, flight), memory_order_relaxed);
}

static bool next_unit(struct worker *self, uint64_t *index)
{
	struct st_run *run = self->run;

	if (st_run_stopped(run))
		return false;
	*index = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
	return *index < st_plan_units(run->plan);
}

static void start_over(struct flight *flight)
{
	flight->done = flight->seen = 0;
	flight->stalls = 0;
	flight->second_look = false;
}

/* The place with the least to do among those not tried yet: so a slow drive
 * gets fewer of the blocks that another has too. False: none is left. */
static bool choose_place(struct worker *self, struct flight *flight)
{
	const struct st_run *run = self->run;
	const struct st_job *job = job_of(self, flight);
	unsigned count = job->copies_count + 1, best_load = UINT32_MAX;
	bool found = false;

	for (unsigned i = 0; i < count; i++) {
		unsigned place = (unsigned)((flight->job + i) % count);
		const struct st_copy *copy = place ? &run->plan->copies[job->copies_first + place - 1] : NULL;
		uint32_t file = copy ? copy->file : job->file;
		unsigned load = atomic_load_explicit(&run->files[file].in_flight, memory_order_relaxed);

		if (flight->failed_bits >> place & 1 || load >= best_load)
			continue;
		best_load = load;
		flight->place = place;
		flight->file = file;
		flight->offset = copy ? copy->offset : job->offset;
		found = true;
	}
	return found;
}

static void begin_flight(struct worker *self, struct in_flight *unit, unsigned index, bool borrows)
{
	const struct st_run *run = self->run;
	struct flight *flight = &unit->flights[index];
	const struct st_job *job = &run->plan->jobs[unit->unit.job_first + index];
	unsigned slot = unit->unit.copies ? 0 : index;

	flight->unit = unit;
	flight->job = unit->unit.job_first + index;
	flight->output = index >= unit->unit.inputs;
	flight->file = job->file;
	flight->offset = job->offset;
	flight->slot = borrows ? NULL : unit->slots + slot * run->shape.slot_bytes;
	flight->slot_index = unit->slot_first + (int)slot;
	flight->needed = flight->total = job->length;
	if (run->plan->direction == ST_WRITE)
		flight->needed = flight->total = st_round_up(job->length, ST_ALIGN);
	else if (flight->slot)
		flight->total = st_round_up(job->length, ST_ALIGN);
	flight->place = 0;
	flight->failed_bits = 0;
	flight->failed_code = 0;
	flight->hashed = false;
	memset(flight->digest, 0, sizeof(flight->digest));
	start_over(flight);
	if (job->copies_count)
		choose_place(self, flight);
}

static void begin(struct worker *self, struct in_flight *unit, uint64_t index)
{
	const struct st_plan *plan = self->run->plan;
	bool borrows;

	unit->unit = st_plan_unit(plan, index);
	unit->input_failed = false;
	borrows = st_unit_borrows(plan, &unit->unit);
	for (unsigned i = 0; i < unit->unit.inputs + unit->unit.outputs; i++)
		begin_flight(self, unit, i, borrows);
	unit->pending = 1; /* until all are on their way */
}

/* Away: the drive has this thread, and no memory of the caller is touched. */
static void go_away(struct worker *self)
{
	atomic_store(self->away, true);
}

static void come_back(struct worker *self)
{
	/* st_run_abandon sets stop, then looks at away: in the one order that all such
	 * operations have, one of the two sees the other. */
	atomic_store(self->away, false);
}

/* ---- what a file sees ------------------------------------------------- */

/* Waits until both bandwidths allow so many bytes more. */
static void pace(struct worker *self, struct st_open_file *file, uint64_t length)
{
	struct st_run *run = self->run;
	uint64_t rate = run->plan->max_bandwidth, file_rate = run->plan->file_max_bandwidth;
	uint64_t now = st_now_ns(), due = now;

	if (!rate && !file_rate)
		return;
	if (rate) {
		uint64_t next = atomic_load(&run->next_ns), from;

		do
			from = next > now ? next : now;
		while (!atomic_compare_exchange_weak(
			&run->next_ns, &next, from + (uint64_t)((double)length * 1e9 / (double)rate)));
		due = from;
	}
	if (file_rate) {
		pthread_mutex_lock(&file->lock);
		if (file->next_ns < now)
			file->next_ns = now;
		if (file->next_ns > due)
			due = file->next_ns;
		file->next_ns += (uint64_t)((double)length * 1e9 / (double)file_rate);
		pthread_mutex_unlock(&file->lock);
	}
	atomic_fetch_add(&run->pacing, 1);
	while ((now = st_now_ns()) < due && !st_run_stopped(run))
		st_nap(due - now < PACE_NS ? due - now : PACE_NS);
	atomic_fetch_sub(&run->pacing, 1);
}

static void depart(struct st_open_file *file, struct flight *flight)
{
	pthread_mutex_lock(&file->lock);
	flight->since_ns = st_now_ns();
	if (atomic_fetch_add(&file->in_flight, 1) == 0)
		file->busy_since_ns = file->alive_ns = flight->since_ns;
	pthread_mutex_unlock(&file->lock);
}

/* moved: bytes or -errno; 0 for a transfer that the queue did not take. */
static void arrive(struct st_open_file *file, const struct flight *flight, int64_t moved)
{
	uint64_t now = st_now_ns();

	pthread_mutex_lock(&file->lock);
	file->alive_ns = now;
	file->stats.transfers++;
	file->stats.flight_ns += now - flight->since_ns;
	if (moved > 0)
		file->stats.bytes += (uint64_t)moved;
	if (moved < 0)
		file->stats.errors++;
	if (atomic_fetch_sub(&file->in_flight, 1) == 1)
		file->stats.busy_ns += now - file->busy_since_ns;
	pthread_mutex_unlock(&file->lock);
}

/* Asks for what is left of a flight. False: the queue failed, and with it the job. */
static bool fly(struct worker *self, struct flight *flight)
{
	struct st_run *run = self->run;
	const struct st_plan *plan = run->plan;
	const struct st_job *job = job_of(self, flight);
	struct st_open_file *file = &run->files[flight->file];
	struct st_request *request = &flight->request;
	int ret;

	request->op = plan->direction == ST_WRITE ? ST_OP_WRITE : ST_OP_READ;
	request->fd = plan->files[flight->file].fd;
	request->direct = atomic_load(&file->direct);
	request->offset = flight->offset + flight->done;
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
		/* A copy is made of the input's memory. */
		if (flight->output)
			job = &plan->jobs[flight->unit->unit.job_first];
		request->iov_count = st_extents_iov(&plan->extents[job->extent_first], flight->done,
			request->length, flight->iov, ST_IOVECS_MAX);
	}
	st_request_trim(request, ST_TRANSFER_MAX);
	pace(self, file, request->length);
	self->stats.transfers++;
	depart(file, flight);
	go_away(self);
	ret = run->io->ops->submit(self->queue, request);
	come_back(self);
	if (ret < 0) {
		arrive(file, flight, 0);
		fail(self, flight, ST_ERING, ret, flight->done);
		return false;
	}
	self->in_flight++;
	return true;
}

static struct flight *land(struct worker *self)
{
	struct flight *flight;

	go_away(self);
	flight = (struct flight *)self->run->io->ops->wait(self->queue);
	come_back(self);
	self->in_flight--;
	arrive(&self->run->files[flight->file], flight, flight->request.result);
	return flight;
}

/* O_DIRECT was accepted at open and refused at a transfer: buffered from now
 * on. Whoever comes second finds it done. */
static int drop_direct(struct worker *self, const struct flight *flight)
{
	struct st_run *run = self->run;
	uint32_t file = flight->file;
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
	const struct st_open_file *file = &run->files[flight->file];
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

/* A slice of an input: copied, summed as copied, and padded with zeros for the
 * encoder where the input is shorter than the group's longest. 0 or -errno. */
static int fill_slice(
	struct worker *self, struct flight *flight, struct st_cursor *cursor, uint64_t at, uint64_t slice)
{
	const struct st_job *job = job_of(self, flight);
	uint64_t here = at >= job->length ? 0 : job->length - at < slice ? job->length - at : slice;
	struct st_ferry *ferry = job->flags & ST_JOB_CAREFUL ? &self->ferry : NULL;
	int ret = here ? st_gather(cursor, flight->slot + at, here, ferry) : 0;

	if (ret < 0)
		return ret;
	memset(flight->slot + at + here, 0, slice - here);
	if (here && job->flags & ST_JOB_CHECKSUM)
		self->run->hasher->update(
			&self->output_hashes[flight - flight->unit->flights], flight->slot + at, here);
	return 0;
}

static void hash_slice(
	struct worker *self, struct flight *flight, struct st_hash *hash, uint64_t at, uint64_t slice)
{
	const struct st_job *job = job_of(self, flight);

	if (at < job->length && job->flags & ST_JOB_CHECKSUM)
		self->run->hasher->update(
			hash, flight->slot + at, job->length - at < slice ? job->length - at : slice);
}

/* The memory to save could not be read: no drive's fault, and nothing to go on with. */
static void fail_source(struct worker *self, struct flight *flight, int code)
{
	struct st_failure failure = {
		.code = code, .file = flight->file, .job = flight->job, .offset = flight->offset};

	result_of(self, flight)->code = code;
	st_run_fail(self->run, &failure);
}

/* Writing a group: inputs are copied, summed and encoded a slice at a time, so
 * that the encoder finds in cache what the copy brought there. */
static int fill_group(struct worker *self, struct in_flight *unit)
{
	const struct st_run *run = self->run;
	unsigned inputs = unit->unit.inputs, outputs = unit->unit.outputs;
	struct st_cursor cursors[ST_GROUP_MAX];
	uint8_t *from[ST_GROUP_MAX], *to[ST_GROUP_MAX];
	uint64_t longest = 0;
	int ret = st_parity_prepare(&self->parity, unit->unit.matrix, inputs, outputs);

	if (ret < 0)
		return ret;
	for (unsigned i = 0; i < inputs + outputs; i++) {
		const struct st_job *job = job_of(self, &unit->flights[i]);

		if (job->flags & ST_JOB_CHECKSUM)
			run->hasher->reset(&self->output_hashes[i], job->seed);
		if (i < inputs) {
			cursors[i] = (struct st_cursor){.extent = &run->plan->extents[job->extent_first]};
			longest = job->length > longest ? job->length : longest;
		}
	}
	for (uint64_t at = 0; at < longest; at += SLICE_BYTES) {
		uint64_t slice = longest - at < SLICE_BYTES ? longest - at : SLICE_BYTES;

		for (unsigned i = 0; i < inputs; i++) {
			ret = fill_slice(self, &unit->flights[i], &cursors[i], at, slice);
			if (ret < 0)
				return ret;
			from[i] = unit->flights[i].slot + at;
		}
		for (unsigned i = 0; i < outputs; i++)
			to[i] = unit->flights[inputs + i].slot + at;
		st_parity_compute(&self->parity, slice, from, to);
		for (unsigned i = inputs; i < inputs + outputs; i++)
			hash_slice(self, &unit->flights[i], &self->output_hashes[i], at, slice);
		if (st_run_stopped(self->run))
			return ST_ECANCELED;
	}
	for (unsigned i = 0; i < inputs + outputs; i++) {
		struct flight *flight = &unit->flights[i];
		uint64_t length = job_of(self, flight)->length;

		memset(flight->slot + length, 0, flight->total - length);
		if (job_of(self, flight)->flags & ST_JOB_CHECKSUM)
			run->hasher->digest(&self->output_hashes[i], flight->digest);
		flight->hashed = true;
	}
	return 0;
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
	struct flight *flight = land(self);
	int ret = look(self, flight);

	if (ret == FLY_ON && !st_run_stopped(run)) {
		if (!fly(self, flight))
			end_write(self, flight->unit);
		return;
	}
	/* What was to be written has its digest, also where it is not: the rest of
	 * its group can bring it back. */
	if (flight->hashed)
		memcpy(result_of(self, flight)->digest, flight->digest, ST_DIGEST_BYTES);
	if (ret < 0) {
		fail(self, flight, ret, 0, flight->done);
	} else if (ret == LANDED && flight->hashed) {
		if (!flight->request.direct)
			run->io->ops->write_back(run->io, flight->request.fd, flight->offset, flight->total);
		succeed(self, flight);
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
			atomic_fetch_add_explicit(&run->bytes, payload(self, flight), memory_order_relaxed);
			continue;
		}
		if (fly(self, flight))
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
static int fill_unit(struct worker *self, struct in_flight *unit)
{
	int ret;

	if (unit->unit.outputs && !unit->unit.copies)
		return fill_group(self, unit);
	ret = fill_slot(self, &unit->flights[0]);
	for (unsigned i = 0; i < unit->unit.inputs + unit->unit.outputs; i++) {
		unit->flights[i].hashed = true;
		memcpy(unit->flights[i].digest, unit->flights[0].digest, ST_DIGEST_BYTES);
	}
	return ret;
}

static void write_units(struct worker *self)
{
	uint64_t index;

	for (;;) {
		struct in_flight *unit;
		int ret = 0;

		while (!self->free)
			land_write(self);
		if (!next_unit(self, &index))
			break;
		unit = take_unit(self);
		begin(self, unit, index);
		if (unit->flights[0].slot) {
			ret = fill_unit(self, unit);
			if (ret == 0)
				fly_unit(self, unit);
			else if (ret != ST_ECANCELED)
				fail_source(self, &unit->flights[0], ret);
		} else {
			bool sums = job_of(self, &unit->flights[0])->flags & ST_JOB_CHECKSUM;

			for (unsigned i = 0; i < unit->unit.inputs + unit->unit.outputs; i++)
				unit->flights[i].hashed = !sums;
			fly_unit(self, unit);
			if (sums)
				hash_unit(self, unit);
		}
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
static bool look_again(struct worker *self, struct flight *flight)
{
	if (!flight->request.direct)
		posix_fadvise(
			flight->request.fd, (off_t)flight->offset, (off_t)flight->total, POSIX_FADV_DONTNEED);
	flight->done = flight->seen = 0;
	flight->second_look = true;
	self->stats.retries++;
	return fly(self, flight);
}

/* Recovers a group's outputs from its inputs, all of which are in their slots. */
static void recover(struct worker *self, struct in_flight *unit)
{
	const struct st_run *run = self->run;
	unsigned inputs = unit->unit.inputs, outputs = unit->unit.outputs;
	struct st_cursor cursors[ST_GROUP_MAX];
	uint8_t *from[ST_GROUP_MAX], *to[ST_GROUP_MAX];
	uint64_t longest = 0;
	int ret = st_parity_prepare(&self->parity, unit->unit.matrix, inputs, outputs);

	for (unsigned i = 0; i < inputs; i++)
		longest = job_of(self, &unit->flights[i])->length > longest
				  ? job_of(self, &unit->flights[i])->length
				  : longest;
	for (unsigned i = 0; i < inputs; i++) {
		uint64_t length = job_of(self, &unit->flights[i])->length;

		memset(unit->flights[i].slot + length, 0, longest - length);
	}
	for (unsigned i = 0; i < outputs; i++) {
		const struct st_job *job = job_of(self, &unit->flights[inputs + i]);

		if (ret < 0)
			fail(self, &unit->flights[inputs + i], ret, 0, 0);
		cursors[i] = (struct st_cursor){.extent = &run->plan->extents[job->extent_first]};
		if (job->flags & ST_JOB_CHECKSUM)
			run->hasher->reset(&self->output_hashes[inputs + i], job->seed);
	}
	if (ret < 0)
		return;
	for (uint64_t at = 0; at < longest; at += SLICE_BYTES) {
		uint64_t slice = longest - at < SLICE_BYTES ? longest - at : SLICE_BYTES;

		for (unsigned i = 0; i < inputs; i++)
			from[i] = unit->flights[i].slot + at;
		for (unsigned i = 0; i < outputs; i++)
			to[i] = unit->flights[inputs + i].slot + at;
		st_parity_compute(&self->parity, slice, from, to);
		for (unsigned i = 0; i < outputs; i++) {
			struct flight *flight = &unit->flights[inputs + i];
			uint64_t length = job_of(self, flight)->length;

			hash_slice(self, flight, &self->output_hashes[inputs + i], at, slice);
			if (at < length)
				st_scatter(&cursors[i], flight->slot + at,
					length - at < slice ? length - at : slice);
		}
		if (st_run_stopped(self->run))
			return;
	}
	for (unsigned i = 0; i < outputs; i++) {
		struct flight *flight = &unit->flights[inputs + i];
		const struct st_job *job = job_of(self, flight);

		if (job->flags & ST_JOB_CHECKSUM) {
			run->hasher->digest(&self->output_hashes[inputs + i], flight->digest);
			if (memcmp(flight->digest, job->digest, ST_DIGEST_BYTES)) {
				memcpy(result_of(self, flight)->digest, flight->digest, ST_DIGEST_BYTES);
				fail(self, flight, ST_ECORRUPT, 0, 0);
				continue;
			}
		}
		succeed(self, flight);
	}
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
			recover(self, unit);
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
		start_over(flight);
		if (!st_run_stopped(self->run) && choose_place(self, flight))
			return fly(self, flight);
		code = flight->failed_code;
	}
	fail(self, flight, code, 0, offset);
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
		succeed(self, flight);
	return false;
}

static void land_read(struct worker *self)
{
	struct flight *flight = land(self);
	int ret = look(self, flight);
	bool on_its_way;

	if (ret == FLY_ON && !st_run_stopped(self->run))
		on_its_way = fly(self, flight);
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
			begin(self, unit, index);
			for (unsigned i = 0; i < unit->unit.inputs; i++)
				if (fly(self, &unit->flights[i]))
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
	go_away(self);
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
