/* engine_test.c: the engine without Python, so that ThreadSanitizer and
 * AddressSanitizer see all of it. Usage: engine_test [DIRECTORY], on a file
 * system whose O_DIRECT means it (ext4, xfs); the current one unless told. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checksum.h"
#include "run.h"
#include "striate.h"

#define CHECK(condition)                                                                                     \
	do {                                                                                                 \
		if (!(condition)) {                                                                          \
			fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, __func__,             \
				#condition);                                                                 \
			exit(1);                                                                             \
		}                                                                                            \
	} while (0)

#define CHUNK (64u << 10)
#define FILE_NAME ".striate-engine-test"
#define JOBS_MAX 512u
#define EXTENTS_MAX (JOBS_MAX * 64u)

static int directory;

/* A plan and its tables, all in one place. */
struct bench {
	struct st_plan plan;
	struct st_file file;
	struct st_job jobs[JOBS_MAX];
	struct st_extent extents[EXTENTS_MAX];
	struct st_result results[JOBS_MAX];
	uint8_t *memory; /* as long as the file, plus an offset */
	void *map;
	size_t map_bytes;
	uint64_t bytes;
};

/* Period 251: blocks in the wrong order show. */
static uint8_t pattern(uint64_t at)
{
	return (uint8_t)(at % 251);
}

static struct bench *bench_new(uint64_t bytes, size_t misalign, unsigned extents_per_job)
{
	struct bench *bench = calloc(1, sizeof(*bench));
	uint64_t at = 0;
	uint64_t extent = 0;

	CHECK(bench);
	bench->map_bytes = bytes + misalign + ST_ALIGN;
	bench->map = mmap(NULL, bench->map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(bench->map != MAP_FAILED);
	bench->memory = (uint8_t *)bench->map + misalign;
	bench->bytes = bytes;
	for (uint64_t i = 0; i < bytes; i++)
		bench->memory[i] = pattern(i);
	while (at < bytes) {
		uint64_t length = bytes - at < CHUNK ? bytes - at : CHUNK;
		uint64_t piece = length / extents_per_job ? length / extents_per_job : 1;
		uint64_t inside = 0;
		struct st_job *job = &bench->jobs[bench->plan.jobs_count++];

		CHECK(bench->plan.jobs_count <= JOBS_MAX);
		job->offset = at;
		job->length = length;
		job->extent_first = extent;
		job->seed = 1000 + at;
		job->flags = ST_JOB_CHECKSUM;
		while (inside < length) {
			uint64_t n = length - inside < 2 * piece ? length - inside : piece;

			CHECK(extent < EXTENTS_MAX);
			bench->extents[extent++] = (struct st_extent){
				.addr = (uint64_t)(uintptr_t)(bench->memory + at + inside), .length = n};
			job->extents_count++;
			inside += n;
		}
		at += length;
	}
	bench->plan.extents_count = extent;
	bench->plan.files = &bench->file;
	bench->plan.files_count = 1;
	bench->plan.jobs = bench->jobs;
	bench->plan.extents = bench->extents;
	bench->plan.results = bench->results;
	bench->plan.register_buffers = 1;
	bench->plan.workers_max = 3;
	return bench;
}

static void bench_free(struct bench *bench)
{
	munmap(bench->map, bench->map_bytes);
	free(bench);
}

static void bench_open(struct bench *bench, struct st_io *io, bool direct)
{
	int flags = O_RDWR | O_CREAT | O_TRUNC | (direct ? O_DIRECT : 0);
	uint32_t mem_align, offset_align;

	bench->file =
		(struct st_file){.fd = st_open(io, directory, FILE_NAME, flags, 0600), .direct = direct};
	CHECK(bench->file.fd >= 0);
	if (st_direct_alignment(bench->file.fd, &mem_align, &offset_align) == 0) {
		bench->file.mem_align = mem_align;
		bench->file.offset_align = offset_align;
	}
}

static int bench_run(
	struct bench *bench, struct st_io *io, struct st_stats *stats, struct st_failure *failure)
{
	struct st_run *run;
	int ret = st_run_start(io, &bench->plan, &run);

	if (ret < 0)
		return ret;
	while (!st_run_wait(run, 50))
		;
	ret = st_run_finish(run, stats, failure);
	st_run_free(run);
	return ret;
}

static void expect_digests(const struct bench *bench)
{
	uint8_t digest[ST_DIGEST_BYTES], *copy = malloc(CHUNK);

	CHECK(copy);
	for (uint64_t i = 0; i < bench->plan.jobs_count; i++) {
		const struct st_job *job = &bench->jobs[i];

		for (uint64_t j = 0; j < job->length; j++)
			copy[j] = pattern(job->offset + j);
		st_checksum(copy, job->length, job->seed, digest);
		CHECK(bench->results[i].code == 0);
		CHECK(!memcmp(digest, bench->results[i].digest, ST_DIGEST_BYTES));
	}
	free(copy);
}

static void take_digests(struct bench *bench)
{
	for (uint64_t i = 0; i < bench->plan.jobs_count; i++)
		memcpy(bench->jobs[i].digest, bench->results[i].digest, ST_DIGEST_BYTES);
}

static void expect_memory(const struct bench *bench)
{
	for (uint64_t i = 0; i < bench->bytes; i++)
		CHECK(bench->memory[i] == pattern(i));
}

static struct st_io *engine(int kind, const struct st_fault *faults, size_t faults_count)
{
	struct st_io *io, *outer;

	CHECK((kind & 1 ? st_io_uring(&io) : st_io_posix(&io)) == 0);
	if (!faults_count && !(kind & 2))
		return io;
	CHECK(st_io_fault(&outer, io, faults, faults_count, false) == 0);
	return outer;
}

/* ---- the tests ------------------------------------------------------------ */

static void test_every_level_of_the_checksum_agrees_whole_and_in_pieces(void)
{
	static const size_t lengths[] = {0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 255, 256, 257, 1023,
		1024, 1025, 4095, 4096, 4097, 65536, 100003};
	static const struct st_hasher *const hashers[] = {
		&st_hasher_baseline,
#ifdef ST_CHECKSUM_X86
		&st_hasher_avx2,
		&st_hasher_avx512,
#endif
	};
	uint8_t *data = malloc(100003);

	CHECK(data);
	for (size_t i = 0; i < 100003; i++)
		data[i] = pattern(i);
	for (size_t h = 0; h < sizeof(hashers) / sizeof(*hashers); h++) {
#ifdef ST_CHECKSUM_X86
		if (h == 1 && !__builtin_cpu_supports("avx2"))
			continue;
		if (h == 2 && !__builtin_cpu_supports("avx512f"))
			continue;
#endif
		for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++) {
			uint64_t seed = i % 2 ? 0 : 0x9e3779b97f4a7c15u * i;
			uint8_t wanted[ST_DIGEST_BYTES], whole[ST_DIGEST_BYTES], pieces[ST_DIGEST_BYTES];
			struct st_hash hash;

			st_hasher_baseline.whole(data, lengths[i], seed, wanted);
			hashers[h]->whole(data, lengths[i], seed, whole);
			CHECK(!memcmp(wanted, whole, ST_DIGEST_BYTES));
			for (size_t step = 1; step < 5000; step = step * 3 + 1) {
				hashers[h]->reset(&hash, seed);
				for (size_t at = 0; at < lengths[i]; at += step)
					hashers[h]->update(&hash, data + at,
						lengths[i] - at < step ? lengths[i] - at : step);
				hashers[h]->digest(&hash, pieces);
				CHECK(!memcmp(wanted, pieces, ST_DIGEST_BYTES));
			}
		}
	}
	free(data);
}

static void test_what_is_written_is_read_back(void)
{
	static const uint64_t sizes[] = {1, 511, 512, 513, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1,
		5 * CHUNK - 1, 5 * CHUNK, 5 * CHUNK + 1, 100 * CHUNK + 12345};
	static const size_t misalignments[] = {0, 1, 64, 512};

	for (int kind = 0; kind < 4; kind++)
		for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++)
			for (size_t m = 0; m < 4; m++)
				for (int variant = 0; variant < 4; variant++) {
					bool stable = variant & 1, direct = variant & 2;
					unsigned pieces = m == 3 ? 1 : (unsigned)(1 + s * 5 % 40);
					struct bench *bench = bench_new(sizes[s], misalignments[m], pieces);
					struct st_io *io = engine(kind, NULL, 0);
					struct st_stats stats;
					struct st_failure failure;

					bench_open(bench, io, direct);
					CHECK(st_allocate(io, bench->file.fd,
						      st_round_up(sizes[s], ST_ALIGN)) == 0);
					for (uint64_t i = 0; stable && i < bench->plan.jobs_count; i++)
						bench->jobs[i].flags |= ST_JOB_STABLE;
					CHECK(bench_run(bench, io, &stats, &failure) == 0);
					CHECK(stats.bytes == sizes[s]);
					CHECK(stats.buffered_files == 0);
					expect_digests(bench);
					if (stable && pieces == 1 && m == 0 && sizes[s] >= CHUNK)
						CHECK(stats.zero_copy_bytes ==
							sizes[s] / CHUNK * CHUNK +
								(sizes[s] % CHUNK % ST_ALIGN
										? 0
										: sizes[s] % CHUNK));
					CHECK(st_truncate(io, bench->file.fd, sizes[s]) == 0);
					CHECK(st_sync(io, bench->file.fd) == 0);

					take_digests(bench);
					memset(bench->map, 0xee, bench->map_bytes);
					bench->plan.direction = ST_READ;
					CHECK(bench_run(bench, io, &stats, &failure) == 0);
					expect_digests(bench);
					expect_memory(bench);
					CHECK(st_close(io, bench->file.fd) == 0);
					CHECK(st_unlink(io, directory, FILE_NAME) == 0);
					st_io_free(io);
					bench_free(bench);
				}
}

static void test_the_first_hard_error_stops_the_run_and_says_where(void)
{
	for (int kind = 0; kind < 2; kind++)
		for (int reads = 0; reads < 2; reads++)
			for (uint64_t nth = 0; nth < 40; nth += 3) {
				struct st_fault fault = {.op = reads ? ST_OP_READ : ST_OP_WRITE,
					.kind = ST_FAULT_ERROR,
					.nth = nth,
					.count = 1,
					.value = EIO};
				struct bench *bench = bench_new(40 * CHUNK, 64, 1);
				struct st_io *io = engine(kind, &fault, 1);
				struct st_stats stats;
				struct st_failure failure;
				unsigned failed = 0;

				bench_open(bench, io, true);
				CHECK(st_allocate(io, bench->file.fd, bench->bytes) == 0);
				if (reads) {
					CHECK(bench_run(bench, io, &stats, &failure) == 0);
					take_digests(bench);
					bench->plan.direction = ST_READ;
				}
				CHECK(bench_run(bench, io, &stats, &failure) == -EIO);
				CHECK(failure.code == -EIO);
				CHECK(failure.offset == bench->jobs[failure.job].offset);
				for (uint64_t i = 0; i < bench->plan.jobs_count; i++) {
					int code = bench->results[i].code;

					CHECK(code == 0 || code == -EIO || code == ST_ESKIPPED);
					failed += code == -EIO;
				}
				CHECK(failed == 1 && bench->results[failure.job].code == -EIO);
				st_close(io, bench->file.fd);
				st_io_free(io);
				bench_free(bench);
			}
}

static void test_short_interrupted_and_refused_transfers_make_no_difference(void)
{
	static const struct st_fault scripts[][2] = {
		{{ST_OP_ANY, ST_FAULT_SHORT, 3, 1, 100}, {ST_OP_ANY, ST_FAULT_ERROR, 7, 2, EINTR}},
		{{ST_OP_ANY, ST_FAULT_SHORT, 0, 0, 20000}, {ST_OP_ANY, ST_FAULT_ERROR, 9, 5, EAGAIN}},
		{{ST_OP_ANY, ST_FAULT_SHORT, 4, 0, 4096}, {ST_OP_WRITE, ST_FAULT_ERROR, 2, 1, EINVAL}},
		{{ST_OP_ANY, ST_FAULT_SHORT, 4, 0, 9000}, {ST_OP_READ, ST_FAULT_ERROR, 1, 1, EINVAL}},
	};

	for (int kind = 0; kind < 2; kind++)
		for (size_t s = 0; s < 4; s++)
			for (int stable = 0; stable < 2; stable++) {
				struct bench *bench = bench_new(20 * CHUNK + 777, 0, 1);
				struct st_io *io = engine(kind, scripts[s], 2);
				struct st_stats stats;
				struct st_failure failure;

				bench_open(bench, io, true);
				for (uint64_t i = 0; stable && i < bench->plan.jobs_count; i++)
					bench->jobs[i].flags |= ST_JOB_STABLE;
				CHECK(bench_run(bench, io, &stats, &failure) == 0);
				CHECK(stats.retries > 0);
				CHECK(stats.buffered_files == (s == 2));
				expect_digests(bench);
				take_digests(bench);
				memset(bench->map, 0xee, bench->map_bytes);
				bench->plan.direction = ST_READ;
				CHECK(bench_run(bench, io, &stats, &failure) == 0);
				expect_memory(bench);
				st_close(io, bench->file.fd);
				st_io_free(io);
				bench_free(bench);
			}
}

static void test_a_wrong_byte_is_read_twice_and_then_called_corrupt(void)
{
	for (int kind = 0; kind < 2; kind++)
		for (int keep_going = 0; keep_going < 2; keep_going++) {
			struct bench *bench = bench_new(30 * CHUNK, 0, 1);
			struct st_io *io = engine(kind, NULL, 0);
			struct st_stats stats;
			struct st_failure failure;
			uint8_t byte = 7;
			int ret;

			bench_open(bench, io, false);
			CHECK(bench_run(bench, io, &stats, &failure) == 0);
			take_digests(bench);
			CHECK(pwrite(bench->file.fd, &byte, 1, 17 * CHUNK + 1) == 1);
			bench->plan.direction = ST_READ;
			bench->plan.keep_going = (uint32_t)keep_going;
			ret = bench_run(bench, io, &stats, &failure);
			CHECK(stats.retries == 1);
			CHECK(bench->results[17].code == ST_ECORRUPT);
			CHECK(memcmp(bench->results[17].digest, bench->jobs[17].digest, ST_DIGEST_BYTES));
			if (keep_going) {
				CHECK(ret == 0);
				for (unsigned i = 0; i < 30; i++)
					CHECK(i == 17 || bench->results[i].code == 0);
			} else {
				CHECK(ret == ST_ECORRUPT && failure.job == 17);
			}
			st_close(io, bench->file.fd);
			st_io_free(io);
			bench_free(bench);
		}
}

static void *cancel_soon(void *arg)
{
	struct st_run *run = arg;

	while (st_run_bytes(run) < 3 * CHUNK)
		st_nap(10000);
	st_run_cancel(run);
	return NULL;
}

static void test_cancelling_drains_and_freeing_early_is_safe(void)
{
	/* Every write is interrupted for a while, so that the run is long. */
	struct st_fault slow = {.op = ST_OP_WRITE, .kind = ST_FAULT_SHORT, .count = 0, .value = 4096};

	for (int kind = 0; kind < 2; kind++)
		for (int round = 0; round < 8; round++) {
			struct bench *bench = bench_new(200 * CHUNK, 64, 3);
			struct st_io *io = engine(kind, &slow, 1);
			struct st_stats stats;
			struct st_failure failure;
			struct st_run *run;
			pthread_t thread;

			bench_open(bench, io, true);
			CHECK(st_run_start(io, &bench->plan, &run) == 0);
			if (round % 2) {
				CHECK(pthread_create(&thread, NULL, cancel_soon, run) == 0);
				while (!st_run_wait(run, 5))
					;
				pthread_join(thread, NULL);
				CHECK(st_run_finish(run, &stats, &failure) == ST_ECANCELED);
				CHECK(stats.bytes < bench->bytes);
			}
			st_run_free(run);
			st_close(io, bench->file.fd);
			st_io_free(io);
			bench_free(bench);
		}
}

static void test_a_power_cut_stops_everything_after_it(void)
{
	struct st_fault cut = {.op = ST_OP_SYNC, .kind = ST_FAULT_CUT, .count = 1};
	struct st_io *io = engine(1, &cut, 1);
	struct bench *bench = bench_new(4 * CHUNK, 0, 1);
	struct st_stats stats;
	struct st_failure failure;
	struct st_trace trace;
	struct stat facts;
	size_t count;

	bench_open(bench, io, true);
	CHECK(bench_run(bench, io, &stats, &failure) == 0);
	CHECK(st_sync(io, bench->file.fd) == -EIO);
	CHECK(st_truncate(io, bench->file.fd, 1) == -EIO);
	CHECK(bench_run(bench, io, &stats, &failure) == -EIO);
	CHECK(st_rename(io, directory, FILE_NAME, directory, "other") == -EIO);
	CHECK(fstat(bench->file.fd, &facts) == 0 && facts.st_size == 4 * CHUNK);
	CHECK(st_close(io, bench->file.fd) == -EIO);
	CHECK(fstat(bench->file.fd, &facts) < 0 && errno == EBADF);
	count = st_trace_count(io);
	CHECK(st_trace_get(io, count - 1, &trace) == 0);
	CHECK(trace.op == ST_OP_CLOSE && trace.result == -EIO);
	CHECK(st_trace_get(io, count - 2, &trace) == 0);
	CHECK(trace.op == ST_OP_RENAME && !strcmp(trace.name, FILE_NAME) && !strcmp(trace.to, "other"));
	CHECK(st_trace_get(io, count, &trace) == -EINVAL);
	st_io_free(io);
	bench_free(bench);
}

static void test_slots_stay_inside_the_budget(void)
{
	static const struct {
		uint64_t budget;
		unsigned workers, depth;
	} table[] = {
		{64 * CHUNK, 4, 8},
		{16 * CHUNK, 4, 4},
		{9 * CHUNK, 4, 2},
		{4 * CHUNK, 4, 1},
		{3 * CHUNK, 3, 1},
		{1 * CHUNK, 1, 1},
	};
	struct bench *bench = bench_new(100 * CHUNK, 0, 1);
	struct st_shape shape;

	bench->plan.workers_max = 4;
	bench->plan.depth = 8;
	for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++) {
		bench->plan.budget_bytes = table[i].budget;
		CHECK(st_plan_shape(&bench->plan, false, &shape) == 0);
		CHECK(shape.workers_count == table[i].workers && shape.depth == table[i].depth);
		CHECK(shape.slot_bytes == CHUNK);
	}
	bench->plan.budget_bytes = CHUNK - 1;
	CHECK(st_plan_shape(&bench->plan, false, &shape) == -ENOMEM);
	bench->plan.budget_bytes = 0;
	bench->plan.jobs_count = 3;
	CHECK(st_plan_shape(&bench->plan, false, &shape) == 0);
	CHECK(shape.workers_count == 3 && shape.depth == 1);
	CHECK(st_plan_shape(&bench->plan, true, &shape) == 0);
	CHECK(shape.workers_count == 3 && shape.depth == 1);
	bench_free(bench);
}

static void test_a_wrong_plan_is_refused_before_anything_starts(void)
{
	struct bench *bench = bench_new(4 * CHUNK, 0, 2);
	struct st_io *io = engine(0, NULL, 0);
	const struct st_job good = bench->jobs[2];
	struct st_run *run = NULL;
	uint64_t job;

#define REFUSED(change)                                                                                      \
	do {                                                                                                 \
		change;                                                                                      \
		CHECK(st_plan_check(&bench->plan, &job) && job == 2);                                        \
		CHECK(st_run_start(io, &bench->plan, &run) == ST_EPLAN);                                     \
		bench->jobs[2] = good;                                                                       \
	} while (0)

	bench_open(bench, io, true);
	CHECK(!st_plan_check(&bench->plan, &job));
	REFUSED(bench->jobs[2].offset++);
	REFUSED(bench->jobs[2].length++);
	REFUSED(bench->jobs[2].length--);
	REFUSED(bench->jobs[2].length = 0);
	REFUSED(bench->jobs[2].file = 1);
	REFUSED(bench->jobs[2].extents_count = 5);
	REFUSED(bench->jobs[2].extent_first = UINT64_MAX);
	REFUSED(bench->jobs[2].offset = (uint64_t)INT64_MAX + 1);
	REFUSED(bench->jobs[2].flags = 8);
	bench->extents[good.extent_first].addr = 0;
	REFUSED((void)0);
	bench->plan.direction = ST_READ;
	CHECK(!st_plan_check(&bench->plan, &job));
	bench->file.mem_align = 3;
	CHECK(st_plan_check(&bench->plan, &job));
	CHECK(!run);
	bench->file.mem_align = 0;
	bench->plan.jobs_count = 0;
	CHECK(bench_run(bench, io, NULL, NULL) == 0);
	st_close(io, bench->file.fd);
	st_io_free(io);
	bench_free(bench);
}

/* ---- groups, copies, dying and hanging files --------------------------- */

#define FILES 5u
#define GROUPS 24u
#define INPUTS 3u
#define OUTPUTS 2u
#define WIDTH (INPUTS + OUTPUTS)
#define LENGTH(group, i) ((uint64_t)CHUNK - ((group) % 3 == (i) ? 4097 : 0))

/* Groups over files that each hold one block of every group. */
struct drives {
	struct st_plan plan;
	struct st_file files[FILES];
	struct st_file_stats stats[FILES];
	struct st_job jobs[GROUPS * WIDTH];
	struct st_extent extents[GROUPS * WIDTH];
	struct st_group groups[GROUPS];
	struct st_copy copies[GROUPS * FILES];
	struct st_result results[GROUPS * WIDTH];
	uint8_t matrix[OUTPUTS * INPUTS];
	uint8_t *memory; /* of every job, a CHUNK each */
};

/* Multiplication in GF(2^8) with 0x11d, bit by bit. */
static uint8_t times(uint8_t a, uint8_t b)
{
	uint8_t product = 0;

	for (; b; b >>= 1, a = (uint8_t)(a << 1 ^ (a & 0x80 ? 0x1d : 0)))
		if (b & 1)
			product ^= a;
	return product;
}

static void file_name(unsigned i, char name[64])
{
	snprintf(name, 64, "%s.%u", FILE_NAME, i);
}

/* The path of a file, as a fault that hits it alone wants it. */
static void drive_of(unsigned i, char path[256])
{
	char link[64], name[64];
	ssize_t length;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", directory);
	length = readlink(link, path, 255);
	CHECK(length > 0 && length < 200);
	file_name(i, name);
	snprintf(path + length, (size_t)(256 - length), "/%s", name);
}

/* Every row of the table: file and place of its block, and memory of its own. */
static struct drives *drives_new(struct st_io *io, unsigned direction, unsigned width)
{
	struct drives *drives = calloc(1, sizeof(*drives));

	CHECK(drives && (drives->memory = aligned_alloc(ST_ALIGN, (size_t)GROUPS * WIDTH * CHUNK)));
	for (unsigned i = 0; i < FILES; i++) {
		char name[64];

		file_name(i, name);
		drives->files[i].fd = st_open(io, directory, name, O_RDWR | O_CREAT | O_DIRECT, 0600);
		drives->files[i].direct = 1;
		CHECK(drives->files[i].fd >= 0);
	}
	for (unsigned row = 0; row < GROUPS * width; row++) {
		drives->jobs[row] = (struct st_job){.offset = (uint64_t)(row / width) * CHUNK,
			.length = LENGTH(row / width, row % width),
			.extent_first = row,
			.extents_count = 1,
			.file = row % width,
			.flags = ST_JOB_CHECKSUM};
		drives->extents[row] = (struct st_extent){
			.addr = (uint64_t)(uintptr_t)(drives->memory + (size_t)row * CHUNK),
			.length = drives->jobs[row].length};
		for (uint64_t at = 0; at < CHUNK; at++)
			drives->memory[(size_t)row * CHUNK + at] = pattern(at + 7 * row);
	}
	drives->plan = (struct st_plan){.direction = direction,
		.files_count = FILES,
		.files = drives->files,
		.jobs = drives->jobs,
		.jobs_count = GROUPS * width,
		.extents = drives->extents,
		.extents_count = GROUPS * width,
		.results = drives->results,
		.file_stats = drives->stats,
		.register_buffers = 1,
		.workers_max = 3};
	return drives;
}

static void drives_free(struct drives *drives, struct st_io *io)
{
	for (unsigned i = 0; i < FILES; i++)
		if (drives->files[i].fd >= 0)
			st_close(io, drives->files[i].fd);
	st_io_free(io);
	free(drives->memory);
	free(drives);
}

static int drives_run(struct drives *drives, struct st_io *io)
{
	struct st_run *run;
	int ret = st_run_start(io, &drives->plan, &run);

	CHECK(ret == 0);
	while (!st_run_wait(run, 20))
		;
	ret = st_run_finish(run, NULL, NULL);
	st_run_free(run);
	return ret;
}

static void use_groups(struct drives *drives, unsigned inputs, unsigned outputs)
{
	for (unsigned i = 0; i < GROUPS; i++)
		drives->groups[i] = (struct st_group){.job_first = (uint64_t)i * (inputs + outputs),
			.inputs_count = inputs,
			.outputs_count = outputs};
	drives->plan.groups = drives->groups;
	drives->plan.groups_count = GROUPS;
	drives->plan.matrix = drives->matrix;
	drives->plan.matrix_bytes = sizeof(drives->matrix);
}

/* A write's outputs have no memory: the extents of their rows go. */
static struct drives *writing_groups(struct st_io *io)
{
	struct drives *drives = drives_new(io, ST_WRITE, WIDTH);

	use_groups(drives, INPUTS, OUTPUTS);
	for (unsigned i = 0; i < sizeof(drives->matrix); i++)
		drives->matrix[i] = (uint8_t)(i < INPUTS ? 1 : 1u << (i - INPUTS));
	for (unsigned row = 0; row < GROUPS * WIDTH; row++)
		if (row % WIDTH >= INPUTS) {
			drives->jobs[row].extents_count = 0;
			drives->jobs[row].length = CHUNK;
		}
	return drives;
}

/* The outputs as they lie in their files, against sums byte by byte. */
static void expect_checks(const struct drives *drives)
{
	uint8_t *found = aligned_alloc(ST_ALIGN, CHUNK), digest[ST_DIGEST_BYTES];

	CHECK(found);
	for (unsigned row = 0; row < GROUPS * WIDTH; row++) {
		unsigned group = row / WIDTH, output = row % WIDTH - INPUTS;

		if (row % WIDTH < INPUTS)
			continue;
		CHECK(drives->results[row].code == 0);
		CHECK(pread(drives->files[row % WIDTH].fd, found, CHUNK, (off_t)group * CHUNK) == CHUNK);
		st_checksum(found, CHUNK, 0, digest);
		CHECK(!memcmp(digest, drives->results[row].digest, ST_DIGEST_BYTES));
		for (uint64_t at = 0; at < CHUNK; at++) {
			uint8_t sum = 0;

			for (unsigned i = 0; i < INPUTS; i++)
				if (at < LENGTH(group, i))
					sum ^= times(drives->matrix[output * INPUTS + i],
						drives->memory[((size_t)group * WIDTH + i) * CHUNK + at]);
			CHECK(found[at] == sum);
		}
	}
	free(found);
}

static void test_check_blocks_are_the_sums_of_their_inputs(void)
{
	struct st_fault shorts = {
		.op = ST_OP_WRITE, .kind = ST_FAULT_SHORT, .nth = 5, .count = 40, .value = 8192};

	for (int kind = 0; kind < 4; kind++) {
		struct st_io *io = engine(kind & 1, &shorts, kind & 2 ? 1 : 0);
		struct drives *drives = writing_groups(io);

		CHECK(drives_run(drives, io) == 0);
		expect_checks(drives);
		CHECK(drives->stats[4].bytes >= (uint64_t)GROUPS * CHUNK && !drives->stats[4].errors);
		CHECK(drives->stats[4].busy_ns && drives->stats[4].busy_ns <= drives->stats[4].flight_ns);
		drives_free(drives, io);
	}
}

/* Input 0 again from inputs 1, 2 and check block 0, whose factors are all 1. */
static void test_a_lost_block_comes_back_and_a_wrong_one_is_told(void)
{
	for (int kind = 0; kind < 2; kind++) {
		struct st_io *io = engine(kind, NULL, 0);
		struct drives *written = writing_groups(io), *drives;
		uint8_t *wanted = malloc(CHUNK);

		CHECK(wanted && drives_run(written, io) == 0);
		drives = drives_new(io, ST_READ, 4);
		use_groups(drives, 3, 1);
		memset(drives->matrix, 1, 3);
		for (unsigned row = 0; row < GROUPS * 4; row++) {
			/* Blocks in the order 1, 2, check 0, and 0 to be computed. */
			unsigned block = (row % 4 + 1) % 4, group = row / 4;
			const struct st_job *source = &written->jobs[group * WIDTH + block];

			drives->jobs[row].file = block;
			drives->jobs[row].length = drives->extents[row].length = source->length;
			memcpy(drives->jobs[row].digest, written->results[group * WIDTH + block].digest,
				ST_DIGEST_BYTES);
			if (row % 4 != 3)
				drives->extents[row].addr = 0;
		}
		drives->jobs[2 * 4 + 3].digest[0] ^= 1;
		drives->jobs[5 * 4 + 1].digest[0] ^= 1;
		drives->plan.keep_going = 1;
		CHECK(drives_run(drives, io) == 0);
		for (unsigned group = 0; group < GROUPS; group++) {
			int32_t code = drives->results[group * 4 + 3].code;

			CHECK(code == (group == 2 ? ST_ECORRUPT : group == 5 ? ST_EINPUT : 0));
			if (!code)
				CHECK(!memcmp(drives->memory + ((size_t)group * 4 + 3) * CHUNK,
					written->memory + (size_t)group * WIDTH * CHUNK, LENGTH(group, 0)));
		}
		CHECK(drives->results[5 * 4 + 1].code == ST_ECORRUPT);
		free(wanted);
		for (unsigned i = 0; i < FILES; i++)
			close(written->files[i].fd);
		free(written->memory);
		free(written);
		drives_free(drives, io);
	}
}

static void test_a_file_that_dies_costs_its_own_blocks(void)
{
	for (int kind = 0; kind < 2; kind++) {
		struct st_fault fault = {.op = ST_OP_WRITE, .kind = ST_FAULT_ERROR, .nth = 9, .value = EIO};
		struct st_io *io;
		struct drives *drives;
		unsigned dead = 0;

		drive_of(1u, fault.drive);
		io = engine(kind, &fault, 1);
		drives = writing_groups(io);
		drives->plan.keep_going = 1;
		drives->plan.depth = 1;
		CHECK(drives_run(drives, io) == 0);
		expect_checks(drives);
		for (unsigned row = 0; row < GROUPS * WIDTH; row++) {
			int32_t code = drives->results[row].code;

			CHECK(code == 0 || (row % WIDTH == 1 && (code == -EIO || code == ST_ESKIPPED)));
			dead += code == -EIO;
		}
		/* Those in flight when it died fail too, one a worker; nothing was tried after that. */
		CHECK(dead >= 1 && dead <= 3);
		CHECK(drives->results[(GROUPS - 1) * WIDTH + 1].code == ST_ESKIPPED);
		CHECK(drives->stats[1].errors == dead && !drives->stats[0].errors);
		drives->plan.keep_going = 0;
		CHECK(drives_run(drives, io) == -EIO);
		drives_free(drives, io);
	}
}

/* Every block is in every file, at the same place. */
static struct drives *reading_copies(struct st_io *io)
{
	struct drives *drives = drives_new(io, ST_READ, 1);

	for (unsigned row = 0; row < GROUPS; row++) {
		uint8_t *block = drives->memory + (size_t)row * CHUNK;

		drives->jobs[row].length = drives->extents[row].length = CHUNK;
		st_checksum(block, CHUNK, 0, drives->jobs[row].digest);
		for (unsigned i = 0; i < FILES; i++)
			CHECK(pwrite(drives->files[i].fd, block, CHUNK, (off_t)row * CHUNK) == CHUNK);
		memset(block, 0, CHUNK);
		drives->jobs[row].copies_first = (uint64_t)row * (FILES - 1);
		drives->jobs[row].copies_count = FILES - 1;
		for (unsigned i = 1; i < FILES; i++)
			drives->copies[row * (FILES - 1) + i - 1] =
				(struct st_copy){.offset = (uint64_t)row * CHUNK, .file = i};
	}
	drives->plan.copies = drives->copies;
	drives->plan.copies_count = GROUPS * (FILES - 1);
	return drives;
}

static void test_copies_are_read_until_one_is_right(void)
{
	for (int kind = 0; kind < 2; kind++) {
		struct st_fault fault = {.op = ST_OP_READ, .kind = ST_FAULT_ERROR, .value = EIO};
		struct st_io *io;
		struct drives *drives;
		uint32_t all = 0;

		drive_of(2u, fault.drive);
		io = engine(kind, &fault, 1);
		drives = reading_copies(io);
		/* File 0 holds wrong bytes of every block, file 2 cannot be read. */
		for (unsigned row = 0; row < GROUPS; row++)
			CHECK(pwrite(drives->files[0].fd, drives->memory, CHUNK, (off_t)row * CHUNK) ==
				CHUNK);
		CHECK(drives_run(drives, io) == 0);
		for (unsigned row = 0; row < GROUPS; row++) {
			const struct st_result *result = &drives->results[row];

			CHECK(result->code == 0 && !(result->failed_copies & ~5u));
			CHECK(!result->failed_copies == !result->failed_code);
			all |= result->failed_copies;
			for (uint64_t at = 0; at < CHUNK; at++)
				CHECK(drives->memory[(size_t)row * CHUNK + at] == pattern(at + 7 * row));
		}
		CHECK(all == 5);
		drives_free(drives, io);
	}
}

static void test_bandwidth_is_kept_by_all_workers_together(void)
{
	for (int kind = 0; kind < 2; kind++)
		for (int each = 0; each < 2; each++) {
			struct st_io *io = engine(kind, NULL, 0);
			struct drives *drives = writing_groups(io);
			uint64_t start = st_now_ns();

			/* Of the run 120 blocks of 64 KiB, of each file 24; the first does not wait. */
			drives->plan.max_bandwidth = each ? 0 : 118u * CHUNK * 5;
			drives->plan.file_max_bandwidth = each ? 23u * CHUNK * 5 : 0;
			drives->plan.idle_priority = 1;
			CHECK(drives_run(drives, io) == 0);
			CHECK(st_now_ns() - start >= 195000000u);
			expect_checks(drives);
			drives_free(drives, io);
		}
}

/* What is abandoned is leaked on purpose, also from the leak checker's view:
 * threads that still wait hold it, and this list. */
static void *abandoned[8];

static void test_an_abandoned_run_touches_nothing_of_the_caller(void)
{
	for (int kind = 0; kind < 2; kind++) {
		struct st_fault fault = {.op = ST_OP_READ, .kind = ST_FAULT_HANG, .nth = 3, .value = 900};
		struct st_io *io = engine(kind, &fault, 1);
		struct drives *drives = reading_copies(io);
		uint32_t hung = UINT32_MAX;
		struct st_run *run;
		int ret = 0;

		drives->plan.no_borrow = 1;
		for (unsigned row = 0; row < GROUPS; row++)
			drives->jobs[row].copies_count = 0;
		CHECK(st_run_start(io, &drives->plan, &run) == 0);
		while (!ret) {
			CHECK(!st_run_wait(run, 20));
			ret = st_run_hung(run, 150000000u, &hung);
		}
		CHECK(hung == 0);
		st_run_abandon(run);
		/* Ours again: whoever writes to it from now on is seen by the sanitizers, and here. */
		memset(drives->memory, 0xee, (size_t)GROUPS * CHUNK);
		st_nap(1200000000u);
		for (size_t at = 0; at < (size_t)GROUPS * CHUNK; at++)
			CHECK(drives->memory[at] == 0xee);
		abandoned[kind * 4] = run;
		abandoned[kind * 4 + 1] = io;
		abandoned[kind * 4 + 2] = drives;
	}
}

static void test_a_call_on_names_that_hangs_takes_its_time_and_one_drive_alone(void)
{
	struct st_fault fault = {.op = ST_OP_MKDIR, .kind = ST_FAULT_HANG, .count = 1, .value = 100};
	struct st_io *io = engine(0, &fault, 1);
	uint64_t start = st_now_ns();
	struct st_trace trace;

	CHECK(st_mkdir(io, directory, FILE_NAME ".d", 0700) == 0);
	CHECK(st_now_ns() - start >= 100000000u);
	CHECK(st_mkdir(io, directory, FILE_NAME ".d", 0700) == -EEXIST);
	CHECK(st_trace_get(io, 1, &trace) == 0);
	CHECK(trace.op == ST_OP_MKDIR && trace.result == -EEXIST && !strcmp(trace.name, FILE_NAME ".d"));
	CHECK(unlinkat(directory, FILE_NAME ".d", AT_REMOVEDIR) == 0);
	st_io_free(io);
}

int main(int argc, char **argv)
{
	directory = open(argc > 1 ? argv[1] : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	CHECK(directory >= 0);
#define RUN(test)                                                                                            \
	do {                                                                                                 \
		test();                                                                                      \
		puts(#test);                                                                                 \
		fflush(stdout);                                                                              \
	} while (0)
	RUN(test_every_level_of_the_checksum_agrees_whole_and_in_pieces);
	RUN(test_what_is_written_is_read_back);
	RUN(test_the_first_hard_error_stops_the_run_and_says_where);
	RUN(test_short_interrupted_and_refused_transfers_make_no_difference);
	RUN(test_a_wrong_byte_is_read_twice_and_then_called_corrupt);
	RUN(test_cancelling_drains_and_freeing_early_is_safe);
	RUN(test_a_power_cut_stops_everything_after_it);
	RUN(test_slots_stay_inside_the_budget);
	RUN(test_a_wrong_plan_is_refused_before_anything_starts);
	RUN(test_check_blocks_are_the_sums_of_their_inputs);
	RUN(test_a_lost_block_comes_back_and_a_wrong_one_is_told);
	RUN(test_a_file_that_dies_costs_its_own_blocks);
	RUN(test_copies_are_read_until_one_is_right);
	RUN(test_bandwidth_is_kept_by_all_workers_together);
	RUN(test_an_abandoned_run_touches_nothing_of_the_caller);
	RUN(test_a_call_on_names_that_hangs_takes_its_time_and_one_drive_alone);
	unlinkat(directory, FILE_NAME, 0);
	for (unsigned i = 0; i < FILES; i++) {
		char name[64];

		file_name(i, name);
		unlinkat(directory, name, 0);
	}
	close(directory);
	return 0;
}
