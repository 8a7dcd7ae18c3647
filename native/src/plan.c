/* plan.c: is a job table sound, which jobs need a slot, and how many workers
 * and slots it takes. Pure: nothing is opened or touched here. */
#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include "run.h"

#define BUDGET_DEFAULT (256ull << 20)
#define DEPTH_DEFAULT 4u
#define DEPTH_GROUPS 2u /* each has many blocks */
#define POSIX_WORKERS_PER_CPU 4u
#define POSIX_WORKERS_MAX 16u
#define WORKERS_MAX 1024u
#define DEPTH_MAX 1024u
/* Files that are to be busy all at once want more in flight. */
#define TRANSFERS_PER_FILE 3u
#define POSIX_TRANSFERS_PER_FILE 2u
#define POSIX_WORKERS_FILES_MAX 32u
#define RING_ENTRIES_MAX 4096u
#define COPIES_MAX 31u /* bits of st_result.failed_copies, but one */

static bool power_of_two(uint32_t value)
{
	return value && !(value & (value - 1));
}

static const char *check_copies(const struct st_plan *plan, const struct st_job *job)
{
	if (!job->copies_count)
		return NULL;
	if (plan->direction == ST_WRITE)
		return "a job of a write has places to read from";
	if (job->copies_count > COPIES_MAX)
		return "a job has too many copies";
	if (job->copies_first > plan->copies_count ||
		job->copies_count > plan->copies_count - job->copies_first)
		return "a job names copies that are not there";
	for (uint32_t i = 0; i < job->copies_count; i++) {
		const struct st_copy *copy = &plan->copies[job->copies_first + i];

		if (copy->file >= plan->files_count)
			return "a copy names a file that is not there";
		if (copy->offset % ST_ALIGN || copy->offset > INT64_MAX - ST_ALIGN - job->length)
			return "a copy's offset is not possible";
	}
	return NULL;
}

static const char *check_job(const struct st_plan *plan, const struct st_job *job, bool output)
{
	uint64_t sum = 0;

	if (!job->length)
		return "a job has no bytes";
	if (job->offset % ST_ALIGN)
		return "a job's offset is not a multiple of 4096";
	if (job->length > INT64_MAX - ST_ALIGN || job->offset > INT64_MAX - ST_ALIGN - job->length)
		return "a job reaches beyond the largest file offset";
	if (job->file >= plan->files_count)
		return "a job names a file that is not there";
	if (job->extent_first > plan->extents_count ||
		job->extents_count > plan->extents_count - job->extent_first)
		return "a job names extents that are not there";
	if (job->flags & ~(uint32_t)(ST_JOB_CHECKSUM | ST_JOB_STABLE | ST_JOB_CAREFUL))
		return "a job has an unknown flag";
	for (uint32_t i = 0; i < job->extents_count; i++) {
		const struct st_extent *extent = &plan->extents[job->extent_first + i];

		if (extent->length > job->length - sum)
			return "a job's extents are longer than the job";
		sum += extent->length;
		if (extent->addr > UINT64_MAX - extent->length)
			return "an extent reaches beyond the address space";
		if (!extent->addr && extent->length && plan->direction == ST_WRITE)
			return "an extent of a write has no address";
	}
	if (output && plan->direction == ST_WRITE)
		return sum ? "an output of a write has extents" : NULL;
	return sum == job->length ? NULL : "a job's extents are shorter than the job";
}

static const char *check_files(const struct st_plan *plan)
{
	for (uint32_t i = 0; i < plan->files_count; i++) {
		const struct st_file *file = &plan->files[i];

		if (file->fd < 0 && !(file->fd == -1 && plan->direction == ST_WRITE && plan->keep_going))
			return "a file is not open";
		if ((file->mem_align && !power_of_two(file->mem_align)) ||
			(file->offset_align && !power_of_two(file->offset_align)))
			return "a file's alignment is not a power of two";
	}
	return NULL;
}

static const char *check_group(const struct st_plan *plan, const struct st_group *group, uint64_t expected)
{
	uint64_t count = (uint64_t)group->inputs_count + group->outputs_count, longest = 0;

	if (group->job_first != expected || count > plan->jobs_count - expected)
		return "the groups do not cover the jobs in their order";
	if (!group->inputs_count || count > 255)
		return "a group has no input, or more than 255 blocks";
	if (group->matrix_first > plan->matrix_bytes || (uint64_t)group->inputs_count * group->outputs_count >
								plan->matrix_bytes - group->matrix_first)
		return "a group names factors that are not there";
	for (uint64_t i = 0; i < count; i++) {
		const struct st_job *job = &plan->jobs[expected + i];

		if (i < group->inputs_count && job->length > longest)
			longest = job->length;
		if (i >= group->inputs_count && job->length > longest)
			return "an output is longer than the inputs";
		if (group->outputs_count && job->copies_count)
			return "a group with outputs has copies to read from";
	}
	return NULL;
}

const char *st_plan_check(const struct st_plan *plan, uint64_t *job)
{
	const char *wrong;
	uint64_t group = 0;

	*job = 0;
	if (plan->direction != ST_WRITE && plan->direction != ST_READ)
		return "the direction is neither write nor read";
	if ((plan->files_count && !plan->files) || (plan->extents_count && !plan->extents) ||
		(plan->jobs_count && (!plan->jobs || !plan->results)) ||
		(plan->groups_count && !plan->groups) || (plan->copies_count && !plan->copies) ||
		(plan->matrix_bytes && !plan->matrix))
		return "a table is missing";
	wrong = check_files(plan);
	if (wrong)
		return wrong;
	for (*job = 0; *job < plan->jobs_count;) {
		uint64_t inputs = 1, count = 1;

		if (plan->groups_count) {
			if (group == plan->groups_count)
				return "the groups do not cover the jobs in their order";
			wrong = check_group(plan, &plan->groups[group], *job);
			if (wrong)
				return wrong;
			inputs = plan->groups[group].inputs_count;
			count = inputs + plan->groups[group].outputs_count;
			group++;
		}
		for (uint64_t i = 0; i < count; i++, ++*job) {
			wrong = check_job(plan, &plan->jobs[*job], i >= inputs);
			if (!wrong)
				wrong = check_copies(plan, &plan->jobs[*job]);
			if (wrong)
				return wrong;
		}
	}
	return group == plan->groups_count ? NULL : "the groups do not cover the jobs in their order";
}

/* May the kernel be shown the caller's memory itself, for a transfer to or
 * from this file? */
static bool job_borrows(const struct st_plan *plan, const struct st_job *job, uint32_t file_index)
{
	const struct st_file *file = &plan->files[file_index];
	uint64_t mem_mask = (file->mem_align ? file->mem_align : ST_ALIGN) - 1;
	uint64_t length_mask = (file->offset_align ? file->offset_align : ST_ALIGN) - 1;
	unsigned pieces = 0;

	if (plan->direction == ST_WRITE) {
		/* A tail needs its padding, which is not in the caller's memory. */
		if (!(job->flags & ST_JOB_STABLE) || (job->flags & ST_JOB_CAREFUL) || job->length % ST_ALIGN)
			return false;
	}
	for (uint32_t i = 0; i < job->extents_count; i++) {
		const struct st_extent *extent = &plan->extents[job->extent_first + i];

		if (!extent->length)
			continue;
		if (!extent->addr || ++pieces > ST_IOVECS_MAX)
			return false;
		/* A file that loses O_DIRECT only becomes less demanding. */
		if (file->direct && ((extent->addr & mem_mask) || (extent->length & length_mask)))
			return false;
	}
	return true;
}

bool st_unit_borrows(const struct st_plan *plan, const struct st_unit *unit)
{
	const struct st_job *job = &plan->jobs[unit->job_first];

	/* Several inputs may be of several minds. */
	if (plan->no_borrow || unit->inputs > 1 || (unit->outputs && !unit->copies) ||
		!job_borrows(plan, job, job->file))
		return false;
	for (unsigned i = 1; i <= unit->outputs; i++)
		if (!job_borrows(plan, job, job[i].file))
			return false;
	for (uint32_t i = 0; i < job->copies_count; i++)
		if (!job_borrows(plan, job, plan->copies[job->copies_first + i].file))
			return false;
	return true;
}

uint64_t st_plan_units(const struct st_plan *plan)
{
	return plan->groups_count ? plan->groups_count : plan->jobs_count;
}

/* Is output number i of a single input the very block? With another seed it
 * has a digest of its own, and is computed like any other output. */
static bool is_copy(const struct st_job *input, unsigned i)
{
	return input[i].length == input->length && input[i].seed == input->seed &&
	       !((input[i].flags ^ input->flags) & ST_JOB_CHECKSUM);
}

struct st_unit st_plan_unit(const struct st_plan *plan, uint64_t index)
{
	const struct st_group *group = &plan->groups[index];
	struct st_unit unit = {.job_first = index, .inputs = 1};

	if (!plan->groups_count)
		return unit;
	unit.job_first = group->job_first;
	unit.inputs = group->inputs_count;
	unit.outputs = group->outputs_count;
	if (!unit.outputs)
		return unit;
	unit.matrix = plan->matrix + group->matrix_first;
	unit.copies = plan->direction == ST_WRITE && unit.inputs == 1;
	for (unsigned i = 0; i < unit.outputs && unit.copies; i++)
		unit.copies = unit.matrix[i] == 1 && is_copy(&plan->jobs[unit.job_first], i + 1);
	return unit;
}

static unsigned cpus_count(void)
{
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0)
		return (unsigned)CPU_COUNT(&set);
	/* More CPUs than a cpu_set_t holds. */
	long online = sysconf(_SC_NPROCESSORS_ONLN);

	return online > 0 ? (unsigned)online : 1;
}

static uint64_t at_least(uint64_t value, uint64_t low)
{
	return value > low ? value : low;
}

static uint64_t at_most(uint64_t value, uint64_t high)
{
	return value < high ? value : high;
}

static uint64_t default_workers(const struct st_plan *plan, bool synchronous)
{
	uint64_t workers = cpus_count();

	if (!synchronous)
		return workers;
	workers = at_most(workers * POSIX_WORKERS_PER_CPU, POSIX_WORKERS_MAX);
	return at_least(workers,
		at_most((uint64_t)plan->files_count * POSIX_TRANSFERS_PER_FILE, POSIX_WORKERS_FILES_MAX));
}

/* What the units need: the widest, the hungriest, the longest. */
static void measure(const struct st_plan *plan, struct st_shape *out)
{
	uint64_t longest = 0;

	for (uint64_t i = 0; i < st_plan_units(plan); i++) {
		struct st_unit unit = st_plan_unit(plan, i);
		const struct st_job *jobs = &plan->jobs[unit.job_first];
		unsigned blocks = unit.inputs + unit.outputs;
		unsigned slots = unit.copies ? 1 : blocks;

		if (blocks > out->unit_blocks)
			out->unit_blocks = blocks;
		if (st_unit_borrows(plan, &unit))
			continue;
		out->slots_wanted += slots;
		if (slots > out->unit_slots)
			out->unit_slots = slots;
		for (unsigned j = 0; j < blocks; j++)
			longest = at_least(longest, jobs[j].length);
	}
	out->slot_bytes = st_round_up(longest, ST_ALIGN);
}

int st_plan_shape(const struct st_plan *plan, bool synchronous, struct st_shape *out)
{
	uint64_t budget = plan->budget_bytes ? plan->budget_bytes : BUDGET_DEFAULT;
	uint64_t workers = plan->workers_max, depth = plan->depth;
	uint64_t units_count = st_plan_units(plan);

	*out = (struct st_shape){0};
	if (!plan->jobs_count)
		return 0;
	measure(plan, out);
	if (!workers)
		workers = default_workers(plan, synchronous);
	workers = at_most(at_most(workers, WORKERS_MAX), units_count);
	if (!depth) {
		uint64_t each = workers * out->unit_blocks;

		depth = plan->groups_count ? DEPTH_GROUPS : DEPTH_DEFAULT;
		depth = at_least(depth, ((uint64_t)plan->files_count * TRANSFERS_PER_FILE + each - 1) / each);
	}
	if (synchronous)
		depth = 1;
	depth = at_most(at_most(depth, DEPTH_MAX), (units_count + workers - 1) / workers);
	depth = at_most(depth, at_least(RING_ENTRIES_MAX / out->unit_blocks, 1));
	if (out->unit_slots) {
		uint64_t units = budget / out->slot_bytes / out->unit_slots;

		if (!units)
			return -ENOMEM;
		/* Workers are kept longer than depth: they also hash and copy. */
		if (workers * depth > units)
			depth = at_least(units / workers, 1);
		workers = at_most(workers, at_least(units / depth, 1));
	}
	out->workers_count = (unsigned)workers;
	out->depth = (unsigned)depth;
	return 0;
}
