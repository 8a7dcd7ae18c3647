/* striate.h: the whole C API of the engine.
 *
 * Python decides, C moves bytes: nothing here knows a layout, JSON or Python.
 * Functions return 0 (or a descriptor, where it says so), -errno, or one of
 * enum st_code. No global state: everything hangs off a struct st_io or a
 * struct st_run that the caller owns. */
#ifndef STRIATE_H
#define STRIATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Offsets on disk are always multiples of this, whatever the drive wants. */
#define ST_ALIGN 4096u
#define ST_DIGEST_BYTES 16u

/* Codes of ours lie far outside errno. */
enum st_code {
	ST_ECORRUPT = -10001,   /* a checksum did not match, twice */
	ST_ECANCELED = -10002,  /* st_run_cancel was called */
	ST_ETRUNCATED = -10003, /* the file ended before the job did */
	ST_ERING = -10004,      /* io_uring itself failed; st_failure.detail is -errno */
	ST_EPLAN = -10005,      /* the job table is wrong (our mistake) */
	ST_ESKIPPED = -10006,   /* the job was not run: another one, or its file, failed first */
	ST_EHUNG = -10007,      /* a file answered no transfer in time: the run was abandoned */
	ST_EINPUT = -10008,     /* an output was not computed: an input of its group failed */
};

/* ---- the drive interface: every call that changes a drive ------------- */

struct st_io; /* one implementation: uring, posix, or fault around another */

int st_io_uring(struct st_io **out);
int st_io_posix(struct st_io **out);
void st_io_free(struct st_io *io);
const char *st_io_name(const struct st_io *io);

/* Each name is relative to dirfd. open adds O_CLOEXEC, returns a descriptor. */
int st_open(struct st_io *io, int dirfd, const char *name, int flags, mode_t mode);
int st_close(struct st_io *io, int fd);
int st_lock(struct st_io *io, int fd); /* flock(LOCK_EX | LOCK_NB) */
int st_chmod(struct st_io *io, int fd, mode_t mode);
int st_chown(struct st_io *io, int fd, uid_t uid, gid_t gid);
int st_allocate(struct st_io *io, int fd, uint64_t length); /* fallocate mode 0; EOPNOTSUPP -> ftruncate */
int st_truncate(struct st_io *io, int fd, uint64_t length);
int st_sync(struct st_io *io, int fd);
int st_sync_directory(struct st_io *io, int dirfd);
int st_rename(struct st_io *io, int dirfd, const char *from, int to_dirfd, const char *to);
int st_unlink(struct st_io *io, int dirfd, const char *name);
int st_mkdir(struct st_io *io, int dirfd, const char *name, mode_t mode);
/* A small read outside a run (headers): full length, or ST_ETRUNCATED. Works
 * on O_DIRECT descriptors too (bounces through an aligned buffer). */
int st_read(struct st_io *io, int fd, void *buf, uint64_t length, uint64_t offset);

/* ---- faults, for tests ------------------------------------------------ */

enum st_op {
	ST_OP_ANY = 0,
	ST_OP_OPEN,
	ST_OP_CLOSE,
	ST_OP_LOCK,
	ST_OP_CHMOD,
	ST_OP_CHOWN,
	ST_OP_ALLOCATE,
	ST_OP_TRUNCATE,
	ST_OP_WRITE,
	ST_OP_READ,
	ST_OP_SYNC,
	ST_OP_SYNC_DIRECTORY,
	ST_OP_RENAME,
	ST_OP_UNLINK,
	ST_OP_MKDIR,
};

enum st_fault_kind {
	/* The operation does nothing and answers -value. */
	ST_FAULT_ERROR = 0,
	/* A transfer answers at most value bytes; what moves is that rounded up to ST_ALIGN. */
	ST_FAULT_SHORT,
	/* Power is lost before the operation: it and every later one do nothing and
	 * answer -EIO. Descriptors are still really closed. */
	ST_FAULT_CUT,
	/* The operation takes value milliseconds longer (0: an hour), as on a drive
	 * that hangs. A transfer hangs without holding up its worker. */
	ST_FAULT_HANG,
};

/* The nth (from 0) operation that matches op suffers; count of them in a row (0: for ever). */
struct st_fault {
	uint32_t op;
	uint32_t kind;
	uint64_t nth;
	uint64_t count;
	uint64_t value;
	/* Only operations on files and directories whose path begins with this; "": all. */
	char drive[256];
};

/* What was asked and answered, in the order of submission. data is a copy of
 * what a write carried (record_data), name/to for the namespace operations. */
struct st_trace {
	uint32_t op;
	int32_t result;
	int32_t fd;
	uint32_t flags;
	uint64_t offset;
	uint64_t length;
	const char *name;
	const char *to;
	const char *where; /* path of fd, or of the directory; NULL when it has none */
	const uint8_t *data;
};

/* Takes ownership of inner. A write that is submitted and a result that
 * arrives later are one entry; its result is filled in on completion. */
int st_io_fault(struct st_io **out, struct st_io *inner, const struct st_fault *faults, size_t faults_count,
	bool record_data);
size_t st_trace_count(const struct st_io *io);
int st_trace_get(const struct st_io *io, size_t index, struct st_trace *out);

/* ---- runs: job table in, result table out ----------------------------- */

struct st_extent {
	uint64_t addr; /* memory; 0 on a read: these bytes are checked and dropped */
	uint64_t length;
};

enum st_job_flags {
	ST_JOB_CHECKSUM = 1u, /* write: report the digest; read: compare with it */
	ST_JOB_STABLE = 2u,   /* write: the memory cannot change, zero copy allowed */
	ST_JOB_CAREFUL = 4u,  /* write: the memory maps a file that may have shrunk: EFAULT, not SIGBUS */
};

/* A second place where a block stands, to read it from. */
struct st_copy {
	uint64_t offset; /* multiple of ST_ALIGN */
	uint32_t file;
	uint32_t reserved;
};

/* One block: length bytes at offset of a file, gathered from (or scattered to)
 * extents whose lengths add up to length. Writes are padded with zeros to
 * ST_ALIGN; the caller truncates. */
struct st_job {
	uint64_t offset; /* multiple of ST_ALIGN */
	uint64_t length; /* > 0 */
	uint64_t extent_first;
	uint32_t extents_count;
	uint32_t file; /* index into st_plan.files */
	uint64_t seed; /* of XXH3-128 */
	uint32_t flags;
	uint32_t copies_count; /* read: further places, tried when this one fails or has more to do; at most
				  31 */
	uint64_t copies_first;
	uint8_t digest[ST_DIGEST_BYTES]; /* read: wanted */
};

/* Inputs and what is computed of them. Their jobs are neighbours in the table:
 * first the inputs, then the outputs, which have no extents on a write and no
 * file on a read. Output j is the sum over i of matrix[j][i] * input i over
 * GF(2^8) with 0x11d; inputs shorter than the longest count as padded with
 * zeros. Without outputs a group is blocks that are handed out together.
 * On a write outputs are written like blocks of their own, and an output
 * of one input with factor 1, its length and its seed is a copy: the same memory
 * goes to a second file.
 * On a read outputs are compared with their digests and scattered. */
struct st_group {
	uint64_t job_first;
	uint64_t matrix_first; /* outputs_count x inputs_count bytes, row by row */
	uint32_t inputs_count;
	uint32_t outputs_count;
};

struct st_result {
	int32_t code; /* 0, -errno, enum st_code */
	/* Of a job with copies: the places that failed; bit 0 the job's own, bit i copy i - 1. */
	uint32_t failed_copies;
	int32_t failed_code; /* of the first of them */
	uint32_t reserved;
	uint8_t digest[ST_DIGEST_BYTES]; /* write: of the bytes written; read: of the bytes found */
};

struct st_file {
	int32_t fd;            /* a write with keep_going: -1 for a file that is dead from the start */
	uint32_t direct;       /* in: opened with O_DIRECT; out: 0 if a transfer was refused and the file went
				  buffered */
	uint32_t mem_align;    /* bytes; 0: not known, treated as ST_ALIGN */
	uint32_t offset_align; /* bytes; 0: not known, treated as ST_ALIGN */
};

/* What a run did with one file. */
struct st_file_stats {
	uint64_t bytes;     /* moved, padding included */
	uint64_t transfers; /* completed */
	uint64_t busy_ns;   /* with at least one transfer in flight */
	uint64_t flight_ns; /* of all transfers, summed */
	uint64_t errors;
};

enum st_direction { ST_WRITE = 0, ST_READ = 1 };

struct st_plan {
	uint32_t direction;
	/* Record each job's error and go on. On a write the file is dead from then on: the rest of its jobs
	 * is skipped, but inputs of groups are still gathered. */
	uint32_t keep_going;
	uint32_t workers_max; /* 0: the CPUs of the affinity mask (posix: 4 x that, at most 16) */
	/* Jobs (or groups) in flight per worker, each with its slots; 0: 4, more for many files (posix:
	 * always 1). */
	uint32_t depth;
	uint64_t budget_bytes; /* of all slots; 0: 256 MiB. One job or group must fit: else start says -ENOMEM
				*/
	uint32_t register_buffers;
	uint32_t files_count;
	struct st_file *files;
	const struct st_job *jobs;
	uint64_t jobs_count;
	const struct st_extent *extents;
	uint64_t extents_count;
	struct st_result *results; /* jobs_count of them */
	/* With groups, these cover the job table once, in order, and are handed out whole. */
	const struct st_group *groups;
	uint64_t groups_count;
	const uint8_t *matrix;
	uint64_t matrix_bytes;
	const struct st_copy *copies;
	uint64_t copies_count;
	struct st_file_stats *file_stats; /* files_count of them, or NULL */
	uint64_t max_bandwidth;           /* bytes/s of the run; 0: no limit */
	uint64_t file_max_bandwidth;      /* bytes/s of each file; 0: no limit */
	uint32_t idle_priority;           /* I/O of the idle class, ioprio_set(2) */
	uint32_t no_borrow;               /* no zero copy: a run that may be abandoned */
};

struct st_failure {
	int32_t code;
	int32_t detail; /* ST_ERING: -errno of the ring call */
	uint32_t file;
	uint64_t job;
	uint64_t offset;
};

struct st_stats {
	uint64_t bytes; /* payload moved */
	uint64_t zero_copy_bytes;
	uint64_t transfers; /* reads or writes submitted */
	uint64_t retries;   /* short, EINTR, EAGAIN, checksum read again */
	uint64_t wait_ns;   /* workers waiting for drives, summed */
	uint64_t work_ns;   /* workers copying, hashing, submitting, summed */
	uint32_t workers_count;
	uint32_t depth;
	uint32_t registered_workers; /* workers whose slots were registered */
	uint32_t register_error;     /* errno of the last refusal, 0 if none */
	uint32_t buffered_files;     /* asked for O_DIRECT, refused at the first I/O */
	uint32_t rings_refused;      /* workers that got no ring and left their jobs to others */
	uint32_t priority_error;     /* errno of the last ioprio_set that was refused */
	uint32_t reserved;
	uint64_t slot_bytes; /* memory of all slots together */
};

struct st_run;

/* What is wrong with a plan, in words, and at which job; NULL: nothing. */
const char *st_plan_check(const struct st_plan *plan, uint64_t *job);

/* start spawns the workers and returns; plan and all it points to must live
 * until st_run_free. wait: 1 finished, 0 still running after timeout_ms.
 * finish may be called once wait said 1: 0 or the first hard error, *failure
 * says where. free waits for the workers (cancelling them) if need be. */
int st_run_start(struct st_io *io, struct st_plan *plan, struct st_run **out);
int st_run_wait(struct st_run *run, int timeout_ms);
void st_run_cancel(struct st_run *run);
uint64_t st_run_bytes(const struct st_run *run);
int st_run_finish(struct st_run *run, struct st_stats *stats, struct st_failure *failure);
void st_run_free(struct st_run *run);

/* 1 and the file's index if one has transfers in flight and none of them came
 * back for timeout_ns, else 0. */
int st_run_hung(struct st_run *run, uint64_t timeout_ns, uint32_t *file);
/* For a plan with no_borrow, instead of finish and free: returns as soon as no
 * worker touches memory of the caller any more. Threads, rings and slots stay
 * as they are for as long as the drive does, so run, io, plan and its tables
 * must never be freed. */
void st_run_abandon(struct st_run *run);

/* ---- checksums and facts ---------------------------------------------- */

const char *st_checksum_level(void); /* "baseline", "avx2" or "avx512" */
void st_checksum(const void *data, size_t length, uint64_t seed, uint8_t digest[ST_DIGEST_BYTES]);
/* XXH3-64 of uuid[16] followed by index as 8 little-endian bytes. */
uint64_t st_block_seed(const uint8_t uuid[16], uint64_t index);

struct st_probe {
	int32_t setup_error;    /* 0 or errno of io_uring_setup */
	uint32_t features;      /* IORING_FEAT_* */
	int32_t register_error; /* 0 or errno of registering one page */
};
int st_probe_uring(struct st_probe *out);
/* statx(STATX_DIOALIGN): 0 and both filled; -ENOTSUP when not reported; 0/0 when refused. */
int st_direct_alignment(int fd, uint32_t *mem_align, uint32_t *offset_align);

#endif
