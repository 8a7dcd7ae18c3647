/* run.h: a run from the inside, shared by plan.c (what it will do), run.c
 * (its life) and worker.c with flight.c and group.c (the threads). */
#ifndef STRIATE_RUN_H
#define STRIATE_RUN_H

#include <pthread.h>
#include <stdatomic.h>

#include "checksum.h"
#include "io.h"

/* More extents than this are gathered into a slot instead. */
#define ST_IOVECS_MAX 16u

/* Blocks of a group, check blocks included. */
#define ST_GROUP_MAX 255u

/* How the work is spread. */
struct st_shape {
	unsigned workers_count;
	unsigned depth;        /* units in flight per worker */
	unsigned unit_blocks;  /* transfers of the widest unit */
	unsigned unit_slots;   /* slots of the hungriest; 0: every job is zero copy */
	size_t slot_bytes;     /* 0: every job is zero copy */
	uint64_t slots_wanted; /* by all units together */
};

/* What is handed out as one: a job, or a group of them. */
struct st_unit {
	uint64_t job_first;
	unsigned inputs, outputs;
	const uint8_t *matrix; /* NULL: no outputs */
	bool copies;           /* the outputs are the input once more: a mirror's write */
};

/* A file during a run. */
struct st_open_file {
	atomic_bool direct; /* becomes false, under run.lock, when O_DIRECT is refused */
	atomic_bool dead;   /* a write failed, and the run goes on without the file */
	atomic_uint in_flight;
	_Atomic uint64_t next_ns; /* when its bandwidth allows the next transfer */
	uint32_t mem_align, offset_align;

	pthread_mutex_t lock; /* of all below */
	struct st_file_stats stats;
	uint64_t busy_since_ns; /* the first transfer of those in flight began */
	uint64_t alive_ns;      /* the last sign of life */
};

struct st_run {
	struct st_io *io;
	const struct st_plan *plan;
	const struct st_hasher *hasher;
	struct st_open_file *files;
	struct st_shape shape;
	pthread_t *threads;
	unsigned threads_count; /* started and not yet joined */
	atomic_bool
		*away; /* of each worker: it waits for a drive or has left, and touches no caller's memory */
	atomic_uint workers_numbered;
	atomic_uint pacing;       /* workers that wait for the bandwidth, not for a drive */
	_Atomic uint64_t next_ns; /* when the run's bandwidth allows the next transfer */

	_Atomic uint64_t next;  /* the unit to hand out next */
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
uint64_t st_plan_units(const struct st_plan *plan);
struct st_unit st_plan_unit(const struct st_plan *plan, uint64_t index);
bool st_unit_borrows(const struct st_plan *plan, const struct st_unit *unit);
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
