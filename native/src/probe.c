/* probe.c: what this kernel and this file system allow. Changes nothing. */
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "striate.h"

int st_probe_uring(struct st_probe *out)
{
	struct io_uring_params params;
	struct io_uring ring;
	struct iovec page;
	int ret;

	memset(out, 0, sizeof(*out));
	memset(&params, 0, sizeof(params));
	ret = io_uring_queue_init_params(4, &ring, &params);
	if (ret < 0) {
		out->setup_error = -ret;
		return 0;
	}
	out->features = params.features;
	page.iov_base = aligned_alloc(ST_ALIGN, ST_ALIGN);
	page.iov_len = ST_ALIGN;
	if (!page.iov_base) {
		io_uring_queue_exit(&ring);
		return -ENOMEM;
	}
	ret = io_uring_register_buffers(&ring, &page, 1);
	if (ret < 0)
		out->register_error = -ret;
	io_uring_queue_exit(&ring);
	free(page.iov_base);
	return 0;
}

/* Asked by number and read by offset: the kernel's interface is fixed, while
 * the header's struct gained the two fields only in Linux 6.1. */
#define STATX_DIOALIGN_MASK 0x2000u
#define STATX_BYTES 256u
#define STATX_OFFSET_MASK 0u
#define STATX_OFFSET_MEM_ALIGN 0x98u
#define STATX_OFFSET_OFFSET_ALIGN 0x9cu

int st_direct_alignment(int fd, uint32_t *mem_align, uint32_t *offset_align)
{
	_Alignas(8) uint8_t answer[STATX_BYTES] = {0};
	uint32_t mask;

	*mem_align = *offset_align = 0;
	if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN_MASK, answer) < 0)
		/* Old kernels lack the call, old seccomp profiles answer EPERM to what
		 * they do not know: either way nothing is reported. */
		return errno == EBADF ? -EBADF : -ENOTSUP;
	memcpy(&mask, answer + STATX_OFFSET_MASK, sizeof(mask));
	if (!(mask & STATX_DIOALIGN_MASK))
		return -ENOTSUP;
	memcpy(mem_align, answer + STATX_OFFSET_MEM_ALIGN, sizeof(*mem_align));
	memcpy(offset_align, answer + STATX_OFFSET_OFFSET_ALIGN, sizeof(*offset_align));
	return 0;
}
