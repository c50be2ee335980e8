/* Preloaded into a process, fails one of its calls that write below a folder; see storage.py, which compiles and controls it.

   All processes of a run map the file $STORAGE_FAULTS, and count their calls together. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

/* As `Control` in storage.py packs it. */
struct control {
    int64_t at;      /* the call to fail, counted from 1; 0: none */
    int64_t error;   /* its errno */
    int64_t full;    /* whether all later calls that need space fail too */
    int64_t count;   /* the calls so far */
    char root[1024]; /* the folder; empty: nothing is counted */
    char where[1024]; /* the call that failed, and its file */
};

static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("STORAGE_FAULTS");
    int file = path ? openat(AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1; /* `control` is not set yet: this call is not counted */
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(file);
}

/* Whether to fail this call, on the file `path`. */
static int fails(const char *call, const char *path, int needs_space) {
    size_t length = strlen(control->root);
    if (strncmp(path, control->root, length) || (path[length] && path[length] != '/')) return 0;
    int64_t number = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST), at = control->at;
    if (!at || number < at || (number > at && !(control->full && needs_space))) return 0;
    if (number == at) snprintf(control->where, sizeof control->where, "%s %s", call, path + length);
    errno = (int)control->error;
    return 1;
}

static int fails_at(const char *call, int folder, const char *path, int needs_space) {
    char whole[2 * PATH_MAX], base[PATH_MAX] = "";
    if (!control || !control->root[0]) return 0;
    if (path[0] == '/') return fails(call, path, needs_space);
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        if (readlink(link, base, sizeof base - 1) < 0) return 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    return fails(call, whole, needs_space);
}

static int fails_on(const char *call, int file, int needs_space) {
    char link[64], path[PATH_MAX] = "";
    if (!control || !control->root[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) < 0) return 0;
    return fails(call, path, needs_space);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define ON_A_FILE(type, name, needs_space, parameters, file, arguments) \
    type name parameters {                                              \
        if (fails_on(#name, file, needs_space)) return -1;              \
        return NEXT(name) arguments;                                    \
    }

ON_A_FILE(ssize_t, write, 1, (int file, const void *data, size_t size), file, (file, data, size))
ON_A_FILE(ssize_t, writev, 1, (int file, const struct iovec *parts, int count), file, (file, parts, count))
ON_A_FILE(ssize_t, pwrite, 1, (int file, const void *data, size_t size, off_t at), file, (file, data, size, at))
ON_A_FILE(ssize_t, pwrite64, 1, (int file, const void *data, size_t size, off64_t at), file, (file, data, size, at))
ON_A_FILE(ssize_t, sendfile, 1, (int to, int from, off_t *at, size_t size), to, (to, from, at, size))
ON_A_FILE(ssize_t, sendfile64, 1, (int to, int from, off64_t *at, size_t size), to, (to, from, at, size))
ON_A_FILE(ssize_t, copy_file_range, 1, (int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags), to,
          (from, at, to, there, size, flags))
ON_A_FILE(int, fsync, 0, (int file), file, (file))
ON_A_FILE(int, fdatasync, 0, (int file), file, (file))

int posix_fallocate(int file, off_t at, off_t size) { /* returns its errno */
    return fails_on("posix_fallocate", file, 1) ? (int)control->error : NEXT(posix_fallocate)(file, at, size);
}

int posix_fallocate64(int file, off64_t at, off64_t size) {
    return fails_on("posix_fallocate", file, 1) ? (int)control->error : NEXT(posix_fallocate64)(file, at, size);
}

int rename(const char *from, const char *to) {
    return fails_at("rename", AT_FDCWD, to, 0) ? -1 : NEXT(rename)(from, to);
}

int renameat(int from_folder, const char *from, int folder, const char *to) {
    return fails_at("rename", folder, to, 0) ? -1 : NEXT(renameat)(from_folder, from, folder, to);
}

#define OPEN(name, folder, parameters, arguments)                                               \
    int name parameters {                                                                       \
        va_list rest;                                                                           \
        va_start(rest, flags);                                                                  \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? (mode_t)va_arg(rest, int) : 0;            \
        va_end(rest);                                                                           \
        if ((flags & O_ACCMODE) != O_RDONLY && fails_at("open", folder, path, flags & O_CREAT)) \
            return -1;                                                                          \
        return NEXT(name) arguments;                                                            \
    }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, folder, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPEN(openat64, folder, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
