/* run.c: the life of a run: start, wait, cancel, finish, free. What its
 * threads do is in worker.c. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "run.h"

bool st_run_stopped(struct st_run *run)
{
	return atomic_load(&run->stop);
}

/* Several workers may fail at once: the lowest job is reported, so that one
 * fault gives one answer more often than not. */
void st_run_fail(struct st_run *run, const struct st_failure *failure)
{
	pthread_mutex_lock(&run->lock);
	if (!run->failed || failure->job < run->failure.job)
		run->failure = *failure;
	run->failed = true;
	pthread_mutex_unlock(&run->lock);
	atomic_store(&run->stop, true);
}

static int init_sync(struct st_run *run)
{
	pthread_condattr_t attr;
	int ret = pthread_condattr_init(&attr);

	if (ret)
		return -ret;
	/* A clock that nobody sets: a stepped wall clock must not stretch a wait. */
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	ret = pthread_cond_init(&run->finished, &attr);
	pthread_condattr_destroy(&attr);
	if (ret)
		return -ret;
	ret = pthread_mutex_init(&run->lock, NULL);
	if (ret)
		pthread_cond_destroy(&run->finished);
	return -ret;
}

static void release(struct st_run *run)
{
	for (uint32_t i = 0; run->files && i < run->plan->files_count; i++)
		pthread_mutex_destroy(&run->files[i].lock);
	free(run->away);
	free(run->threads);
	free(run->files);
	free(run);
}

static int start_threads(struct st_run *run)
{
	unsigned wanted = run->shape.workers_count;
	sigset_t all, before;
	int ret = 0;

	/* A thread inherits the mask, so it never runs with a signal open: handlers,
	 * timers among them, stay with the threads that expect them. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	run->active = wanted;
	while (run->threads_count < wanted) {
		ret = pthread_create(&run->threads[run->threads_count], NULL, st_worker_main, run);
		if (ret)
			break;
		run->threads_count++;
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);

	/* Fewer threads than wanted do the same work. */
	pthread_mutex_lock(&run->lock);
	run->active -= wanted - run->threads_count;
	pthread_mutex_unlock(&run->lock);
	return run->threads_count || !wanted ? 0 : -ret;
}

int st_run_start(struct st_io *io, struct st_plan *plan, struct st_run **out)
{
	struct st_run *run;
	uint64_t job;
	int ret;

	if (st_plan_check(plan, &job))
		return ST_EPLAN;
	run = calloc(1, sizeof(*run));
	if (!run)
		return -ENOMEM;
	run->io = io;
	run->plan = plan;
	run->hasher = st_hasher_choose();
	ret = st_plan_shape(plan, io->ops->synchronous, &run->shape);
	if (ret < 0)
		goto free_run;
	ret = -ENOMEM;
	run->files = calloc(plan->files_count + 1u, sizeof(*run->files));
	run->threads = calloc(run->shape.workers_count + 1u, sizeof(*run->threads));
	run->away = calloc(run->shape.workers_count + 1u, sizeof(*run->away));
	for (uint32_t i = 0; run->files && i < plan->files_count; i++)
		pthread_mutex_init(&run->files[i].lock, NULL);
	if (!run->files || !run->threads || !run->away)
		goto free_run;
	for (uint32_t i = 0; i < plan->files_count; i++) {
		const struct st_file *file = &plan->files[i];

		atomic_init(&run->files[i].direct, file->direct != 0);
		atomic_init(&run->files[i].dead, file->fd < 0);
		run->files[i].mem_align = file->mem_align ? file->mem_align : ST_ALIGN;
		run->files[i].offset_align = file->offset_align ? file->offset_align : ST_ALIGN;
	}
	for (uint64_t i = 0; i < plan->jobs_count; i++)
		plan->results[i] = (struct st_result){.code = ST_ESKIPPED};
	run->stats.depth = run->shape.depth;
	ret = init_sync(run);
	if (ret < 0)
		goto free_run;
	ret = start_threads(run);
	if (ret < 0)
		goto destroy_sync;
	*out = run;
	return 0;

destroy_sync:
	pthread_mutex_destroy(&run->lock);
	pthread_cond_destroy(&run->finished);
free_run:
	release(run);
	return ret;
}

int st_run_wait(struct st_run *run, int timeout_ms)
{
	struct timespec until;
	int done;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += timeout_ms / 1000;
	until.tv_nsec += timeout_ms % 1000 * 1000000L;
	if (until.tv_nsec >= 1000000000L) {
		until.tv_sec++;
		until.tv_nsec -= 1000000000L;
	}
	pthread_mutex_lock(&run->lock);
	while (run->active && pthread_cond_timedwait(&run->finished, &run->lock, &until) == 0)
		;
	done = run->active == 0;
	pthread_mutex_unlock(&run->lock);
	return done;
}

void st_run_cancel(struct st_run *run)
{
	atomic_store(&run->canceled, true);
	atomic_store(&run->stop, true);
}

uint64_t st_run_bytes(const struct st_run *run)
{
	return atomic_load_explicit(&run->bytes, memory_order_relaxed);
}

static void join(struct st_run *run)
{
	while (run->threads_count)
		pthread_join(run->threads[--run->threads_count], NULL);
}

int st_run_hung(struct st_run *run, uint64_t timeout_ns, uint32_t *file)
{
	uint64_t now = st_now_ns();
	int hung = 0;

	/* Who waits for the bandwidth does not look at what has come back. */
	if (atomic_load(&run->pacing))
		return 0;
	for (uint32_t i = 0; i < run->plan->files_count && !hung; i++) {
		struct st_open_file *open_file = &run->files[i];

		pthread_mutex_lock(&open_file->lock);
		hung = atomic_load(&open_file->in_flight) && now > open_file->alive_ns &&
		       now - open_file->alive_ns > timeout_ns;
		pthread_mutex_unlock(&open_file->lock);
		if (hung)
			*file = i;
	}
	return hung;
}

void st_run_abandon(struct st_run *run)
{
	atomic_store(&run->canceled, true);
	atomic_store(&run->stop, true);
	/* A worker that is not away will be soon: nothing that it does takes longer
	 * than a slice. One that comes back sees stop before it touches anything. */
	for (unsigned i = 0; i < run->threads_count; i++)
		while (!atomic_load(&run->away[i]))
			st_nap(100000u);
	for (unsigned i = 0; i < run->threads_count; i++)
		pthread_detach(run->threads[i]);
}

static bool jobs_skipped(const struct st_run *run)
{
	for (uint64_t i = 0; i < run->plan->jobs_count; i++)
		if (run->plan->results[i].code == ST_ESKIPPED)
			return true;
	return false;
}

int st_run_finish(struct st_run *run, struct st_stats *stats, struct st_failure *failure)
{
	struct st_failure none = {0};

	join(run);
	/* One worker without a queue leaves its jobs to the others; when none got
	 * one, nothing ran at all. */
	if (run->shape.workers_count && !run->ready && !run->failed) {
		run->failure = run->start_failure;
		run->failed = true;
	}
	/* Cancelled too late to matter is not cancelled. */
	if (!run->failed && atomic_load(&run->canceled) && jobs_skipped(run)) {
		run->failure = (struct st_failure){.code = ST_ECANCELED};
		run->failed = true;
	}
	for (uint32_t i = 0; i < run->plan->files_count; i++) {
		run->plan->files[i].direct = atomic_load(&run->files[i].direct);
		if (run->plan->file_stats)
			run->plan->file_stats[i] = run->files[i].stats;
	}
	run->stats.bytes = st_run_bytes(run);
	run->stats.workers_count = run->ready;
	if (stats)
		*stats = run->stats;
	if (failure)
		*failure = run->failed ? run->failure : none;
	return run->failed ? run->failure.code : 0;
}

void st_run_free(struct st_run *run)
{
	if (!run)
		return;
	if (run->threads_count)
		st_run_cancel(run);
	join(run);
	pthread_mutex_destroy(&run->lock);
	pthread_cond_destroy(&run->finished);
	release(run);
}
