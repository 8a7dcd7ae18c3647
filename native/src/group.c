/* group.c: check blocks when writing, lost blocks when reading: both are sums
 * of the blocks in a group's slots, taken slice by slice. */
#include "worker.h"

#include <string.h>

/* A group during its one pass from the first slice to the last. */
struct pass {
	struct worker *self;
	struct flight *flights;
	unsigned inputs, outputs;
	uint64_t longest; /* bytes of the longest input */
	struct st_cursor cursors[ST_GROUP_MAX];
};

static bool sums(const struct pass *pass, unsigned i)
{
	return job_of(pass->self, &pass->flights[i])->flags & ST_JOB_CHECKSUM;
}

/* Ready for the first slice. 0 or -ENOMEM. */
static int begin_pass(struct pass *pass, struct worker *self, struct in_flight *unit)
{
	const struct st_run *run = self->run;

	pass->self = self;
	pass->flights = unit->flights;
	pass->inputs = unit->unit.inputs;
	pass->outputs = unit->unit.outputs;
	pass->longest = 0;
	for (unsigned i = 0; i < pass->inputs + pass->outputs; i++) {
		const struct st_job *job = job_of(self, &pass->flights[i]);

		pass->cursors[i] = (struct st_cursor){.extent = &run->plan->extents[job->extent_first]};
		if (sums(pass, i))
			run->hasher->reset(&self->output_hashes[i], job->seed);
		if (i < pass->inputs && job->length > pass->longest)
			pass->longest = job->length;
	}
	if (!pass->outputs)
		return 0;
	return st_parity_prepare(&self->parity, unit->unit.matrix, pass->inputs, pass->outputs);
}

/* How much of block i lies in the slice at that place. */
static uint64_t here_of(const struct pass *pass, unsigned i, uint64_t at, uint64_t slice)
{
	uint64_t length = job_of(pass->self, &pass->flights[i])->length;

	if (at >= length)
		return 0;
	return length - at < slice ? length - at : slice;
}

static void hash_slice(struct pass *pass, unsigned i, uint64_t at, uint64_t here)
{
	if (here && sums(pass, i))
		pass->self->run->hasher->update(
			&pass->self->output_hashes[i], pass->flights[i].slot + at, here);
}

static void finish_hash(struct pass *pass, unsigned i)
{
	if (sums(pass, i))
		pass->self->run->hasher->digest(&pass->self->output_hashes[i], pass->flights[i].digest);
}

/* A slice of an input: copied, summed as copied, and padded with zeros for the
 * encoder where the input is shorter than the group's longest. 0 or -errno. */
static int fill_slice(struct pass *pass, unsigned i, uint64_t at, uint64_t slice)
{
	bool careful = job_of(pass->self, &pass->flights[i])->flags & ST_JOB_CAREFUL;
	uint8_t *to = pass->flights[i].slot + at;
	uint64_t here = here_of(pass, i, at, slice);
	int ret = st_gather(&pass->cursors[i], to, here, careful ? &pass->self->ferry : NULL);

	if (ret < 0)
		return ret;
	memset(to + here, 0, slice - here);
	hash_slice(pass, i, at, here);
	return 0;
}

/* A slice of every output, from the inputs in their slots. */
static void compute_slice(struct pass *pass, uint64_t at, uint64_t slice)
{
	uint8_t *from[ST_GROUP_MAX], *to[ST_GROUP_MAX];

	if (!pass->outputs)
		return;
	for (unsigned i = 0; i < pass->inputs; i++)
		from[i] = pass->flights[i].slot + at;
	for (unsigned i = 0; i < pass->outputs; i++)
		to[i] = pass->flights[pass->inputs + i].slot + at;
	st_parity_compute(&pass->self->parity, slice, from, to);
	for (unsigned i = pass->inputs; i < pass->inputs + pass->outputs; i++)
		hash_slice(pass, i, at, here_of(pass, i, at, slice));
}

int st_group_fill(struct worker *self, struct in_flight *unit, struct flight **culprit)
{
	struct pass pass;
	int ret = begin_pass(&pass, self, unit);

	*culprit = pass.flights;
	if (ret < 0)
		return ret;
	for (uint64_t at = 0; at < pass.longest; at += ST_SLICE_BYTES) {
		uint64_t slice = st_slice_of(pass.longest, at);

		for (unsigned i = 0; i < pass.inputs; i++) {
			*culprit = &pass.flights[i];
			ret = fill_slice(&pass, i, at, slice);
			if (ret < 0)
				return ret;
		}
		compute_slice(&pass, at, slice);
		if (st_run_stopped(self->run))
			return ST_ECANCELED;
	}
	for (unsigned i = 0; i < pass.inputs + pass.outputs; i++) {
		struct flight *flight = &pass.flights[i];
		uint64_t length = job_of(self, flight)->length;

		memset(flight->slot + length, 0, flight->total - length);
		finish_hash(&pass, i);
		flight->hashed = true;
	}
	return 0;
}

/* Are the bytes of an output those that were wanted? */
static void judge_output(struct pass *pass, unsigned i)
{
	struct worker *self = pass->self;
	struct flight *flight = &pass->flights[i];

	finish_hash(pass, i);
	if (sums(pass, i) && memcmp(flight->digest, job_of(self, flight)->digest, ST_DIGEST_BYTES)) {
		memcpy(result_of(self, flight)->digest, flight->digest, ST_DIGEST_BYTES);
		st_flight_fail(self, flight, ST_ECORRUPT, 0, 0);
		return;
	}
	st_flight_succeed(self, flight);
}

void st_group_recover(struct worker *self, struct in_flight *unit)
{
	struct pass pass;
	int ret = begin_pass(&pass, self, unit);
	unsigned end = pass.inputs + pass.outputs;

	for (unsigned i = pass.inputs; i < end && ret < 0; i++)
		st_flight_fail(self, &pass.flights[i], ret, 0, 0);
	if (ret < 0)
		return;
	for (unsigned i = 0; i < pass.inputs; i++) {
		uint64_t length = job_of(self, &pass.flights[i])->length;

		memset(pass.flights[i].slot + length, 0, pass.longest - length);
	}
	for (uint64_t at = 0; at < pass.longest; at += ST_SLICE_BYTES) {
		uint64_t slice = st_slice_of(pass.longest, at);

		compute_slice(&pass, at, slice);
		for (unsigned i = pass.inputs; i < end; i++)
			st_scatter(&pass.cursors[i], pass.flights[i].slot + at, here_of(&pass, i, at, slice));
		if (st_run_stopped(self->run))
			return;
	}
	for (unsigned i = pass.inputs; i < end; i++)
		judge_output(&pass, i);
}
