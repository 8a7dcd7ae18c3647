/* worker.h: a worker from the inside, shared by worker.c (its loop), flight.c
 * (one block and its transfers) and group.c (what is computed of blocks). */
#ifndef STRIATE_WORKER_H
#define STRIATE_WORKER_H

#include "extents.h"
#include "parity.h"
#include "run.h"
#include "slots.h"

/* Copy and checksum go over the data in slices of this, so that the second
 * finds in cache what the first touched. */
#define ST_SLICE_BYTES (128u << 10)

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

static inline const struct st_job *job_of(const struct worker *self, const struct flight *flight)
{
	return &self->run->plan->jobs[flight->job];
}

static inline struct st_result *result_of(const struct worker *self, const struct flight *flight)
{
	return &self->run->plan->results[flight->job];
}

static inline uint64_t st_slice_of(uint64_t length, uint64_t at)
{
	return length - at < ST_SLICE_BYTES ? length - at : ST_SLICE_BYTES;
}

/* ---- flight.c --------------------------------------------------------- */

/* Takes up the unit of that number: nothing is on its way yet. */
void st_unit_begin(struct worker *self, struct in_flight *unit, uint64_t index);
/* Asks for what is left of a flight. False: it did not leave, because the run
 * stopped or the queue failed, and with it the job. */
bool st_flight_fly(struct worker *self, struct flight *flight);
/* The next flight whose transfer came back; one must be on its way. */
struct flight *st_flight_land(struct worker *self);
/* Looks at what a transfer answered: LANDED, FLY_ON or an error. */
int st_flight_look(struct worker *self, struct flight *flight);
/* As if nothing had been transferred yet. */
void st_flight_start_over(struct flight *flight);
/* The place with the least to do among those not tried yet: so a slow drive
 * gets fewer of the blocks that another has too. False: none is left. */
bool st_flight_choose_place(struct worker *self, struct flight *flight);
/* Records that a job failed, and ends the run unless it was told to go on. */
void st_flight_fail(struct worker *self, struct flight *flight, int code, int detail, uint64_t offset);
void st_flight_succeed(struct worker *self, const struct flight *flight);
/* What of a job counts as progress: check blocks do not, nor what is read
 * only to compute something else. */
uint64_t st_flight_payload(const struct worker *self, const struct flight *flight);

/* ---- group.c ---------------------------------------------------------- */

/* A write: copies the inputs into their slots, sums and encodes them. 0,
 * -errno (*culprit is the input whose memory could not be read), or
 * ST_ECANCELED when the run stopped. */
int st_group_fill(struct worker *self, struct in_flight *unit, struct flight **culprit);
/* A read: computes the outputs from the inputs, all of which are in their
 * slots, and hands them out. */
void st_group_recover(struct worker *self, struct in_flight *unit);

#endif
