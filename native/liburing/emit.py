"""Writes the C of ``striate.liburing._liburing``: cffi's API-mode bindings of liburing itself.

Run by CMake as ``python emit.py OUT.c``. Only declarations live here; what they are for is in src/striate/liburing/.
API mode, because most of liburing is inline functions of a header that only a C compiler can call.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

# "..." marks a struct whose other fields and whose size the compiler fills in: the declarations hold for every
# liburing from 2.3 on.
DECLARATIONS = """
struct io_uring { int ring_fd; unsigned features; unsigned flags; ...; };
struct io_uring_sqe { unsigned long long user_data; ...; };
struct io_uring_cqe { unsigned long long user_data; int res; ...; };
struct io_uring_params { unsigned sq_entries; unsigned cq_entries; unsigned flags; unsigned features; ...; };
struct io_uring_probe { unsigned char last_op; ...; };
struct iovec { void *iov_base; size_t iov_len; };

int io_uring_queue_init_params(unsigned entries, struct io_uring *ring, struct io_uring_params *params);
void io_uring_queue_exit(struct io_uring *ring);

struct io_uring_probe *io_uring_get_probe_ring(struct io_uring *ring);
void io_uring_free_probe(struct io_uring_probe *probe);
int io_uring_opcode_supported(const struct io_uring_probe *probe, int op);

struct io_uring_sqe *io_uring_get_sqe(struct io_uring *ring);
int io_uring_submit(struct io_uring *ring);
int io_uring_peek_cqe(struct io_uring *ring, struct io_uring_cqe **cqe);
void io_uring_cqe_seen(struct io_uring *ring, struct io_uring_cqe *cqe);

void io_uring_prep_nop(struct io_uring_sqe *sqe);
void io_uring_prep_read(struct io_uring_sqe *sqe, int fd, void *buf, unsigned length, unsigned long long offset);
void io_uring_prep_write(struct io_uring_sqe *sqe, int fd, const void *buf, unsigned length, unsigned long long offset);
void io_uring_prep_read_fixed(struct io_uring_sqe *sqe, int fd, void *buf, unsigned length,
                              unsigned long long offset, int buf_index);
void io_uring_prep_write_fixed(struct io_uring_sqe *sqe, int fd, const void *buf, unsigned length,
                               unsigned long long offset, int buf_index);
void io_uring_prep_fsync(struct io_uring_sqe *sqe, int fd, unsigned fsync_flags);
void io_uring_prep_cancel64(struct io_uring_sqe *sqe, uint64_t user_data, int flags);
void io_uring_sqe_set_data64(struct io_uring_sqe *sqe, uint64_t data);

int io_uring_register_buffers(struct io_uring *ring, const struct iovec *iovecs, unsigned count);
int io_uring_unregister_buffers(struct io_uring *ring);

#define IORING_FSYNC_DATASYNC ...
#define IORING_SETUP_CLAMP ...

/* Held against the tables in probe.py by a test: the kernel's numbers never change, typing them can. */
#define IORING_FEAT_NODROP ...
#define IORING_FEAT_EXT_ARG ...
#define IORING_FEAT_LINKED_FILE ...
#define IORING_OP_FSYNC ...
#define IORING_OP_READ ...
#define IORING_OP_RENAMEAT ...
#define IORING_OP_SEND_ZC ...

int liburing_version_major(void);
int liburing_version_minor(void);
"""

SOURCE = """
#include <liburing.h>
#include <sys/uio.h>

/* io_uring_major_version() came with liburing 2.4, its macros too; 2.3 tells neither. */
#ifdef IO_URING_VERSION_MAJOR
static int liburing_version_major(void) { return IO_URING_VERSION_MAJOR; }
static int liburing_version_minor(void) { return IO_URING_VERSION_MINOR; }
#else
static int liburing_version_major(void) { return 0; }
static int liburing_version_minor(void) { return 0; }
#endif
"""


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: emit.py OUT.c", file=sys.stderr)
        return 2
    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    # The name without the package: CPython looks for PyInit_<last part of the dotted name>.
    ffi.set_source("_liburing", SOURCE)
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_c_code(sys.argv[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
