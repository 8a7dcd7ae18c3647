/* run.h: a run from the inside, shared by plan.c (what it will do), run.c
 * (its life) and worker.c (the threads). */
#ifndef STRIATE_RUN_H
#define STRIATE_RUN_H

#include <pthread.h>
#include <stdatomic.h>

#include "checksum.h"
#include "io.h"

/* More extents than this are gathered into a slot instead. */
#define ST_IOVECS_MAX 16u

/* How the work is spread. */
struct st_shape {
	unsigned workers_count;
	unsigned depth;
	size_t slot_bytes;  /* 0: every job is zero copy */
	uint64_t slot_jobs; /* jobs that go through a slot */
};

/* A file during a run. */
struct st_open_file {
	atomic_bool direct; /* becomes false, under run.lock, when O_DIRECT is refused */
	uint32_t mem_align, offset_align;
};

struct st_run {
	struct st_io *io;
	const struct st_plan *plan;
	const struct st_hasher *hasher;
	struct st_open_file *files;
	struct st_shape shape;
	pthread_t *threads;
	unsigned threads_count; /* started and not yet joined */

	_Atomic uint64_t next;  /* the job to hand out next */
	_Atomic uint64_t bytes; /* payload done */
	atomic_bool stop;       /* hand out nothing more: failed or cancelled */
	atomic_bool canceled;

	pthread_mutex_t lock; /* of all below */
	pthread_cond_t finished;
	unsigned active; /* workers that have not left */
	unsigned ready;  /* workers that got a queue and slots */
	bool failed;
	struct st_failure failure;       /* of the lowest job that failed */
	struct st_failure start_failure; /* why a worker could not begin */
	struct st_stats stats;
};

/* plan.c */
bool st_job_borrows(const struct st_plan *plan, const struct st_job *job, bool direct);
int st_plan_shape(const struct st_plan *plan, bool synchronous, struct st_shape *out);

/* worker.c: the body of a thread; arg is the run. */
void *st_worker_main(void *arg);

/* run.c */
void st_run_fail(struct st_run *run, const struct st_failure *failure);
bool st_run_stopped(struct st_run *run);

static inline uint64_t st_round_up(uint64_t value, uint64_t align)
{
	return (value + align - 1) / align * align;
}

#endif
