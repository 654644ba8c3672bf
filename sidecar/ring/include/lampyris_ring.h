/* The native ring of Lampyris: reads and writes of mounted files through memory shared with the pod's sidecar.
 *
 * Link with liblampyris_ring.so. One thread uses one ring. Functions that return a number return a
 * negative errno on failure. The ABI under it is described in sidecar/ring/src/layout.rs. */
#ifndef LAMPYRIS_RING_H
#define LAMPYRIS_RING_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LAMPYRIS_RING_LENGTH_MAX (4u << 20)
#define LAMPYRIS_RING_ENTRIES_MAX 256u

enum lampyris_op { LAMPYRIS_READ = 1, LAMPYRIS_WRITE = 2, LAMPYRIS_SYNC = 3 };
enum lampyris_open { LAMPYRIS_OPEN_WRITE = 1, LAMPYRIS_OPEN_CREATE = 2 };

struct lampyris_ring;

struct lampyris_completion {
    uint64_t user_data;
    int64_t result; /* bytes, or a negative errno */
};

/* entries: transfers under way at most, a power of two up to 256. NULL on failure, *error = errno. */
struct lampyris_ring *lampyris_ring_connect(const char *socket, uint32_t entries, int *error);
void lampyris_ring_destroy(struct lampyris_ring *ring);

/* New memory shared with the sidecar; it lives as long as the ring. NULL on failure. */
void *lampyris_ring_register(struct lampyris_ring *ring, size_t bytes, uint32_t *iov);

/* path: absolute, as the application sees it. Returns the file's number. */
int64_t lampyris_ring_open(struct lampyris_ring *ring, const char *path, uint32_t flags, uint64_t *size);
int lampyris_ring_close(struct lampyris_ring *ring, uint32_t file);

/* -EAGAIN when as many transfers as granted are under way: wait first. */
int lampyris_ring_prepare(struct lampyris_ring *ring, int op, uint32_t file, uint32_t iov, uint64_t iov_offset,
                          uint64_t file_offset, uint32_t length, uint64_t user_data);
int lampyris_ring_submit(struct lampyris_ring *ring);

/* Up to max completions; waits for the first one at most timeout_ms, negative = for ever. Returns how many. */
int lampyris_ring_wait(struct lampyris_ring *ring, struct lampyris_completion *completions, uint32_t max,
                       int64_t timeout_ms);

#ifdef __cplusplus
}
#endif
#endif
