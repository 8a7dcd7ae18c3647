/* flight.c: one block on its way: where it is read from or written to, what
 * its transfers answer, and what its file sees of them. */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

/* A transfer that makes no progress is asked for again this often before its
 * answer is believed; from the ninth on with a pause of STALL_NS. */
#define STALLS_MAX 100u
#define STALLS_EAGER 8u
#define STALL_NS 1000000u

/* A wait for the bandwidth looks at the run's end this often. */
#define PACE_NS 50000000u

void st_flight_fail(struct worker *self, struct flight *flight, int code, int detail, uint64_t offset)
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

uint64_t st_flight_payload(const struct worker *self, const struct flight *flight)
{
	const struct st_plan *plan = self->run->plan;
	const struct st_job *job = job_of(self, flight);

	if (plan->direction == ST_WRITE)
		return flight->output ? 0 : job->length;
	if (flight->unit->unit.outputs && job->extents_count && !plan->extents[job->extent_first].addr)
		return 0;
	return job->length;
}

void st_flight_succeed(struct worker *self, const struct flight *flight)
{
	struct st_result *result = result_of(self, flight);

	result->code = 0;
	memcpy(result->digest, flight->digest, ST_DIGEST_BYTES);
	if (!flight->slot)
		self->stats.zero_copy_bytes += job_of(self, flight)->length;
	atomic_fetch_add_explicit(&self->run->bytes, st_flight_payload(self, flight), memory_order_relaxed);
}

void st_flight_start_over(struct flight *flight)
{
	flight->done = flight->seen = 0;
	flight->stalls = 0;
	flight->second_look = false;
}

bool st_flight_choose_place(struct worker *self, struct flight *flight)
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
	st_flight_start_over(flight);
	if (job->copies_count)
		st_flight_choose_place(self, flight);
}

void st_unit_begin(struct worker *self, struct in_flight *unit, uint64_t index)
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

/* Takes so many bytes of a bandwidth. When their time begins. */
static uint64_t reserve(_Atomic uint64_t *next_ns, uint64_t now, uint64_t length, uint64_t rate)
{
	uint64_t span = (uint64_t)((double)length * 1e9 / (double)rate);
	uint64_t next = atomic_load(next_ns), from;

	do
		from = next > now ? next : now;
	while (!atomic_compare_exchange_weak(next_ns, &next, from + span));
	return from;
}

/* Waits until both bandwidths allow so many bytes more. False: the run stopped. */
static bool pace(struct worker *self, struct st_open_file *file, uint64_t length)
{
	struct st_run *run = self->run;
	uint64_t rate = run->plan->max_bandwidth, file_rate = run->plan->file_max_bandwidth;
	uint64_t now, due = 0;

	if (!rate && !file_rate)
		return true;
	now = st_now_ns();
	if (rate)
		due = reserve(&run->next_ns, now, length, rate);
	if (file_rate) {
		uint64_t file_due = reserve(&file->next_ns, now, length, file_rate);

		due = file_due > due ? file_due : due;
	}
	atomic_fetch_add(&run->pacing, 1);
	while ((now = st_now_ns()) < due && !st_run_stopped(run))
		st_nap(due - now < PACE_NS ? due - now : PACE_NS);
	atomic_fetch_sub(&run->pacing, 1);
	return !st_run_stopped(run);
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

bool st_flight_fly(struct worker *self, struct flight *flight)
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
	if (!pace(self, file, request->length))
		return false;
	self->stats.transfers++;
	depart(file, flight);
	go_away(self);
	ret = run->io->ops->submit(self->queue, request);
	come_back(self);
	if (ret < 0) {
		arrive(file, flight, 0);
		st_flight_fail(self, flight, ST_ERING, ret, flight->done);
		return false;
	}
	self->in_flight++;
	return true;
}

struct flight *st_flight_land(struct worker *self)
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

int st_flight_look(struct worker *self, struct flight *flight)
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
	/* An abandoned run's descriptors may be somebody else's by now. */
	if ((moved == -EINVAL || moved == -EOPNOTSUPP) && flight->request.direct &&
		!st_run_stopped(self->run)) {
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
