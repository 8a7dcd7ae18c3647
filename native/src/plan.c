/* plan.c: is a job table sound, which jobs need a slot, and how many workers
 * and slots it takes. Pure: nothing is opened or touched here. */
#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include "run.h"

#define BUDGET_DEFAULT (256ull << 20)
#define DEPTH_DEFAULT 4u
#define POSIX_WORKERS_PER_CPU 4u
#define POSIX_WORKERS_MAX 16u
#define WORKERS_MAX 1024u
#define DEPTH_MAX 1024u

static bool power_of_two(uint32_t value)
{
	return value && !(value & (value - 1));
}

static const char *check_job(const struct st_plan *plan, const struct st_job *job)
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
	return sum == job->length ? NULL : "a job's extents are shorter than the job";
}

const char *st_plan_check(const struct st_plan *plan, uint64_t *job)
{
	*job = 0;
	if (plan->direction != ST_WRITE && plan->direction != ST_READ)
		return "the direction is neither write nor read";
	if ((plan->files_count && !plan->files) || (plan->extents_count && !plan->extents) ||
		(plan->jobs_count && (!plan->jobs || !plan->results)))
		return "a table is missing";
	for (uint32_t i = 0; i < plan->files_count; i++) {
		const struct st_file *file = &plan->files[i];

		if (file->fd < 0)
			return "a file is not open";
		if ((file->mem_align && !power_of_two(file->mem_align)) ||
			(file->offset_align && !power_of_two(file->offset_align)))
			return "a file's alignment is not a power of two";
	}
	for (*job = 0; *job < plan->jobs_count; ++*job) {
		const char *wrong = check_job(plan, &plan->jobs[*job]);

		if (wrong)
			return wrong;
	}
	return NULL;
}

/* May the kernel be shown the caller's memory itself? direct: the file still
 * has O_DIRECT, so its alignments count. */
bool st_job_borrows(const struct st_plan *plan, const struct st_job *job, bool direct)
{
	const struct st_file *file = &plan->files[job->file];
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
		if (direct && ((extent->addr & mem_mask) || (extent->length & length_mask)))
			return false;
	}
	return true;
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

int st_plan_shape(const struct st_plan *plan, bool synchronous, struct st_shape *out)
{
	uint64_t budget = plan->budget_bytes ? plan->budget_bytes : BUDGET_DEFAULT;
	uint64_t workers = plan->workers_max, depth = plan->depth;
	uint64_t longest = 0, slots;

	*out = (struct st_shape){0};
	if (!plan->jobs_count)
		return 0;
	for (uint64_t i = 0; i < plan->jobs_count; i++) {
		const struct st_job *job = &plan->jobs[i];

		/* A file that loses O_DIRECT only becomes less demanding. */
		if (st_job_borrows(plan, job, plan->files[job->file].direct))
			continue;
		out->slot_jobs++;
		if (job->length > longest)
			longest = job->length;
	}
	if (!workers) {
		workers = cpus_count();
		if (synchronous)
			workers = workers * POSIX_WORKERS_PER_CPU < POSIX_WORKERS_MAX
					  ? workers * POSIX_WORKERS_PER_CPU
					  : POSIX_WORKERS_MAX;
	}
	if (workers > WORKERS_MAX)
		workers = WORKERS_MAX;
	if (workers > plan->jobs_count)
		workers = plan->jobs_count;
	if (synchronous)
		depth = 1;
	if (!depth)
		depth = DEPTH_DEFAULT;
	if (depth > DEPTH_MAX)
		depth = DEPTH_MAX;
	if (depth > (plan->jobs_count + workers - 1) / workers)
		depth = (plan->jobs_count + workers - 1) / workers;
	if (longest) {
		out->slot_bytes = st_round_up(longest, ST_ALIGN);
		slots = budget / out->slot_bytes;
		if (!slots)
			return -ENOMEM;
		/* Workers are kept longer than depth: they also hash and copy. */
		if (workers * depth > slots)
			depth = slots / workers ? slots / workers : 1;
		if (workers * depth > slots)
			workers = slots;
	}
	out->workers_count = (unsigned)workers;
	out->depth = (unsigned)depth;
	return 0;
}
