/*
 * Cuts a process at the n-th durable step.
 *
 * Preloaded into a process, it counts the calls that change files below given directories, and at the n-th kills the
 * process or lets the call fail. The product under test knows nothing of it.
 *
 *   FAULTLINE_DIRS    directories, joined by ':', as canonical paths; calls on other files are not counted
 *   FAULTLINE_AT      number of the call to act on, from 1
 *   FAULTLINE_FROM    acts on this call and on every later one
 *   FAULTLINE_ACTION  kill-before | kill-after | errno:<number>
 *   FAULTLINE_LOG     file to which a line "<number> <call> <path>" is appended before each counted call
 *   FAULTLINE_NOT     processes with this word as their first argument are left alone (default: dcmi-worker)
 *
 * Counted: open with O_CREAT (creat), write, pwrite, writev, ftruncate, fsync, fdatasync, rename, renameat(2), unlink,
 * unlinkat, mkdir, mkdirat, rmdir. The count runs through all threads of a process; a child that executes another
 * program begins anew.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { NONE, KILL_BEFORE, KILL_AFTER, FAIL };
enum verdict { PASS, KILL_WHEN_DONE, REFUSE };

static enum action action;
static long at, from;
static int failure;
static char dirs[8192];
static char log_path[PATH_MAX];
static atomic_long count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* True if the first argument of this process is `word`. */
static int first_argument_is(const char *word)
{
	char line[4096];
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	long n = syscall(SYS_read, fd, line, sizeof(line) - 1);
	syscall(SYS_close, fd);
	if (n <= 0)
		return 0;
	line[n] = 0;
	size_t program = strlen(line) + 1;
	return program < (size_t)n && strcmp(line + program, word) == 0;
}

static void copy(char *to, size_t size, const char *text)
{
	if (text && snprintf(to, size, "%s", text) >= (int)size) {
		fputs("faultline: a variable is too long\n", stderr);
		abort();
	}
}

static void setup(void)
{
	const char *word = getenv("FAULTLINE_NOT");
	const char *what = getenv("FAULTLINE_ACTION");
	const char *number;
	if (first_argument_is(word ? word : "dcmi-worker"))
		return;
	copy(log_path, sizeof(log_path), getenv("FAULTLINE_LOG"));
	if ((number = getenv("FAULTLINE_AT")))
		at = strtol(number, NULL, 10);
	if ((number = getenv("FAULTLINE_FROM")))
		from = strtol(number, NULL, 10);
	if (what && strcmp(what, "kill-before") == 0) {
		action = KILL_BEFORE;
	} else if (what && strcmp(what, "kill-after") == 0) {
		action = KILL_AFTER;
	} else if (what && strncmp(what, "errno:", 6) == 0) {
		action = FAIL;
		failure = atoi(what + 6);
	} else if (what) {
		fprintf(stderr, "faultline: action %s is unknown\n", what);
		abort();
	}
	copy(dirs, sizeof(dirs), getenv("FAULTLINE_DIRS"));
}

/* True if a canonical path lies in one of the directories, or is one; compared by whole components. */
static int is_inside(const char *path)
{
	for (const char *dir = dirs; *dir;) {
		size_t length = strcspn(dir, ":");
		if (length && strncmp(path, dir, length) == 0 && (path[length] == '/' || path[length] == 0))
			return 1;
		dir += length + (dir[length] == ':');
	}
	return 0;
}

/* Canonical path of the directory of a named file with its last component; 0 if there is none. */
static int path_of_name(int dir, const char *name, char *out)
{
	char whole[PATH_MAX], parent[PATH_MAX];
	if (!name || !*name)
		return 0;
	if (name[0] == '/' || dir == AT_FDCWD) {
		if (snprintf(whole, sizeof(whole), "%s", name) >= (int)sizeof(whole))
			return 0;
	} else if (snprintf(whole, sizeof(whole), "/proc/self/fd/%d/%s", dir, name) >= (int)sizeof(whole)) {
		return 0;
	}
	size_t length = strlen(whole);
	while (length > 1 && whole[length - 1] == '/')
		whole[--length] = 0;
	char *slash = strrchr(whole, '/');
	const char *base = slash ? slash + 1 : whole;
	if (slash)
		*slash = 0;
	if (!realpath(slash ? (slash == whole ? "/" : whole) : ".", parent))
		return 0;
	return snprintf(out, PATH_MAX, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, base) < PATH_MAX;
}

static int path_of_fd(int fd, char *out)
{
	char link[64];
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	long n = readlink(link, out, PATH_MAX - 1);
	if (n <= 0)
		return 0;
	out[n] = 0;
	return 1;
}

static void die(void)
{
	syscall(SYS_kill, getpid(), SIGKILL);
	for (;;)
		pause();
}

/* Counts a call on a path, and says what is to become of it. */
static enum verdict judge(const char *call, const char *path)
{
	int before = errno;
	if (!is_inside(path))
		return PASS;
	long number = atomic_fetch_add(&count, 1) + 1;
	if (log_path[0]) {
		char line[PATH_MAX + 64];
		int length = snprintf(line, sizeof(line), "%ld %s %s\n", number, call, path);
		int fd = (int)syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
		if (fd >= 0) {
			syscall(SYS_write, fd, line, (size_t)length);
			syscall(SYS_close, fd);
		}
	}
	errno = before;
	if (number != at && !(from > 0 && number >= from))
		return PASS;
	switch (action) {
	case KILL_BEFORE:
		die();
		return PASS;
	case KILL_AFTER:
		return KILL_WHEN_DONE;
	case FAIL:
		errno = failure;
		return REFUSE;
	case NONE:
		break;
	}
	return PASS;
}

static enum verdict judge_name(const char *call, int dir, const char *name)
{
	char path[PATH_MAX];
	int before = errno;
	pthread_once(&once, setup);
	int known = dirs[0] && path_of_name(dir, name, path);
	errno = before;
	return known ? judge(call, path) : PASS;
}

static enum verdict judge_fd(const char *call, int fd)
{
	char path[PATH_MAX];
	int before = errno;
	pthread_once(&once, setup);
	int known = dirs[0] && path_of_fd(fd, path);
	errno = before;
	return known ? judge(call, path) : PASS;
}

/* Runs the call `real` after its verdict. */
#define RUN(judged, type, real)                    \
	do {                                       \
		enum verdict v_ = (judged);        \
		if (v_ == REFUSE)                  \
			return -1;                 \
		type r_ = (real);                  \
		if (v_ == KILL_WHEN_DONE)          \
			die();                     \
		return r_;                         \
	} while (0)

/* The next definition of a function, looked up once. */
#define NEXT(type, name, ...)                                        \
	static type (*next)(__VA_ARGS__);                            \
	if (!next)                                                   \
		*(void **)&next = dlsym(RTLD_NEXT, name)

#define CREATES(flags) (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE)

#define MODE(mode, flags)                                            \
	mode_t mode = 0;                                             \
	if (CREATES(flags)) {                                        \
		va_list rest_;                                       \
		va_start(rest_, flags);                              \
		mode = (mode_t)va_arg(rest_, unsigned int);          \
		va_end(rest_);                                       \
	}

int open(const char *name, int flags, ...)
{
	NEXT(int, "open", const char *, int, ...);
	MODE(mode, flags);
	RUN(CREATES(flags) ? judge_name("open", AT_FDCWD, name) : PASS, int, next(name, flags, mode));
}

int open64(const char *name, int flags, ...)
{
	NEXT(int, "open64", const char *, int, ...);
	MODE(mode, flags);
	RUN(CREATES(flags) ? judge_name("open", AT_FDCWD, name) : PASS, int, next(name, flags, mode));
}

int openat(int dir, const char *name, int flags, ...)
{
	NEXT(int, "openat", int, const char *, int, ...);
	MODE(mode, flags);
	RUN(CREATES(flags) ? judge_name("open", dir, name) : PASS, int, next(dir, name, flags, mode));
}

int openat64(int dir, const char *name, int flags, ...)
{
	NEXT(int, "openat64", int, const char *, int, ...);
	MODE(mode, flags);
	RUN(CREATES(flags) ? judge_name("open", dir, name) : PASS, int, next(dir, name, flags, mode));
}

int creat(const char *name, mode_t mode)
{
	NEXT(int, "creat", const char *, mode_t);
	RUN(judge_name("open", AT_FDCWD, name), int, next(name, mode));
}

int creat64(const char *name, mode_t mode)
{
	NEXT(int, "creat64", const char *, mode_t);
	RUN(judge_name("open", AT_FDCWD, name), int, next(name, mode));
}

ssize_t write(int fd, const void *bytes, size_t size)
{
	NEXT(ssize_t, "write", int, const void *, size_t);
	RUN(judge_fd("write", fd), ssize_t, next(fd, bytes, size));
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset)
{
	NEXT(ssize_t, "pwrite", int, const void *, size_t, off_t);
	RUN(judge_fd("pwrite", fd), ssize_t, next(fd, bytes, size, offset));
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset)
{
	NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
	RUN(judge_fd("pwrite", fd), ssize_t, next(fd, bytes, size, offset));
}

ssize_t writev(int fd, const struct iovec *parts, int number)
{
	NEXT(ssize_t, "writev", int, const struct iovec *, int);
	RUN(judge_fd("writev", fd), ssize_t, next(fd, parts, number));
}

int ftruncate(int fd, off_t size)
{
	NEXT(int, "ftruncate", int, off_t);
	RUN(judge_fd("ftruncate", fd), int, next(fd, size));
}

int ftruncate64(int fd, off64_t size)
{
	NEXT(int, "ftruncate64", int, off64_t);
	RUN(judge_fd("ftruncate", fd), int, next(fd, size));
}

int fsync(int fd)
{
	NEXT(int, "fsync", int);
	RUN(judge_fd("fsync", fd), int, next(fd));
}

int fdatasync(int fd)
{
	NEXT(int, "fdatasync", int);
	RUN(judge_fd("fdatasync", fd), int, next(fd));
}

/* A rename is judged by where the file goes: that is what it changes for a reader. */
int rename(const char *old, const char *new)
{
	NEXT(int, "rename", const char *, const char *);
	RUN(judge_name("rename", AT_FDCWD, new), int, next(old, new));
}

int renameat(int old_dir, const char *old, int new_dir, const char *new)
{
	NEXT(int, "renameat", int, const char *, int, const char *);
	RUN(judge_name("rename", new_dir, new), int, next(old_dir, old, new_dir, new));
}

int renameat2(int old_dir, const char *old, int new_dir, const char *new, unsigned int flags)
{
	NEXT(int, "renameat2", int, const char *, int, const char *, unsigned int);
	RUN(judge_name("rename", new_dir, new), int, next(old_dir, old, new_dir, new, flags));
}

int unlink(const char *name)
{
	NEXT(int, "unlink", const char *);
	RUN(judge_name("unlink", AT_FDCWD, name), int, next(name));
}

int unlinkat(int dir, const char *name, int flags)
{
	NEXT(int, "unlinkat", int, const char *, int);
	RUN(judge_name("unlink", dir, name), int, next(dir, name, flags));
}

int mkdir(const char *name, mode_t mode)
{
	NEXT(int, "mkdir", const char *, mode_t);
	RUN(judge_name("mkdir", AT_FDCWD, name), int, next(name, mode));
}

int mkdirat(int dir, const char *name, mode_t mode)
{
	NEXT(int, "mkdirat", int, const char *, mode_t);
	RUN(judge_name("mkdir", dir, name), int, next(dir, name, mode));
}

int rmdir(const char *name)
{
	NEXT(int, "rmdir", const char *);
	RUN(judge_name("rmdir", AT_FDCWD, name), int, next(name));
}
