/* Reads the file argv[2] through the ring at argv[1] and prints its bytes; exits with 0 if all went well. */
#include "../include/lampyris_ring.h"
#include <stdio.h>

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int error = 0;
    struct lampyris_ring *ring = lampyris_ring_connect(argv[1], 8, &error);
    if (!ring) return fprintf(stderr, "connect: errno %d\n", error), 3;
    uint32_t iov = 0;
    char *base = lampyris_ring_register(ring, 1 << 20, &iov);
    if (!base) return 4;
    uint64_t size = 0, at = 0;
    int64_t file = lampyris_ring_open(ring, argv[2], 0, &size);
    if (file < 0) return fprintf(stderr, "open: %lld\n", (long long)file), 5;
    while (at < size) {
        struct lampyris_completion done;
        if (lampyris_ring_prepare(ring, LAMPYRIS_READ, (uint32_t)file, iov, 0, at, 1 << 20, at)) return 6;
        if (lampyris_ring_submit(ring)) return 7;
        if (lampyris_ring_wait(ring, &done, 1, 10000) != 1) return 8;
        if (done.user_data != at || done.result <= 0) return 9;
        fwrite(base, 1, (size_t)done.result, stdout);
        at += (uint64_t)done.result;
    }
    if (lampyris_ring_close(ring, (uint32_t)file)) return 10;
    lampyris_ring_destroy(ring);
    return 0;
}
