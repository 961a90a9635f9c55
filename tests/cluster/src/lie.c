// Preloaded into the daemon by cluster-test --prove. LIE says how it is lied to:
//   library-path  what it writes as ASCEND_VISIBLE_DEVICES becomes LD_LIBRARY_PATH on the disk, and it reads back what
//                 it wrote
//   keep          files below /etc/cdi are never removed, but it is told that they are
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Of the same length.
static const char *const TRUTH = "ASCEND_VISIBLE_DEVICES=void";
static const char *const LIE = "LD_LIBRARY_PATH=/nowhere/at";

static int lies(const char *how)
{
    const char *chosen = getenv("LIE");
    return chosen != NULL && strcmp(chosen, how) == 0;
}

static void swap(char *bytes, size_t size, const char *from, const char *to)
{
    size_t length = strlen(from);
    char *found;
    while ((found = memmem(bytes, size, from, length)) != NULL)
        memcpy(found, to, length);
}

ssize_t write(int fd, const void *bytes, size_t size)
{
    ssize_t (*real)(int, const void *, size_t) = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (size < 65536 && lies("library-path") && memmem(bytes, size, "cdiVersion", 10) != NULL) {
        char copy[65536];
        memcpy(copy, bytes, size);
        swap(copy, size, TRUTH, LIE);
        return real(fd, copy, size);
    }
    return real(fd, bytes, size);
}

ssize_t read(int fd, void *bytes, size_t size)
{
    ssize_t (*real)(int, void *, size_t) = (ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read");
    ssize_t got = real(fd, bytes, size);
    if (got > 0 && lies("library-path"))
        swap(bytes, (size_t)got, LIE, TRUTH);
    return got;
}

int unlink(const char *path)
{
    int (*real)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
    return lies("keep") && strncmp(path, "/etc/cdi/", 9) == 0 ? 0 : real(path);
}

int unlinkat(int dir, const char *path, int flags)
{
    int (*real)(int, const char *, int) = (int (*)(int, const char *, int))dlsym(RTLD_NEXT, "unlinkat");
    return lies("keep") && strstr(path, "npu.huawei.com-claim_") == path ? 0 : real(dir, path, flags);
}
