/* A directory mounted as a bucket would be: each request takes a while, and all of them share a line each way.
 *
 *   cc -O2 -o mount benchmarks/mount.c $(pkg-config --cflags --libs fuse3)
 *   LATENCY=0.03 BANDWIDTH=125e6 COUNTS=FILE ./mount DIRECTORY MOUNTPOINT -f -o max_threads=400,max_idle_threads=400
 *
 * The simulator that the tests use follows Cloud Storage FUSE more closely, but serves some hundred files a second, being
 * Python. This one has only what decides speed: a read is a request when it is the first of an open file, or begins
 * elsewhere than the last ended; what was listed is known, anything else is asked for; a file that was written is one
 * request when it is closed; a listing is one for 5,000 names. BANDWIDTH is in bytes a second and direction, 0 for no limit.
 */
#define FUSE_USE_VERSION 314
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct handle { int file; off_t next; int read; off_t written; };
enum kind { STAT, LIST, GET, PUT, DELETE, COPY, KINDS };

static const char *names[KINDS] = {"stat", "list", "get", "put", "delete", "copy"};
static long requests[KINDS], moved[KINDS];
static char *root;
static double latency, bandwidth, line_free_at[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void wait_until(double then) {
    struct timespec t = {(time_t)then, (long)((then - (time_t)then) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) { }
}

static void request(enum kind kind, long size, int is_new) {
    double then = now();
    pthread_mutex_lock(&lock);
    requests[kind] += is_new;
    moved[kind] += size;
    if (bandwidth > 0 && size > 0) {
        double *free_at = &line_free_at[kind == PUT];
        if (*free_at < then) *free_at = then;
        *free_at += size / bandwidth;
        if (*free_at > then) then = *free_at;
    }
    pthread_mutex_unlock(&lock);
    if (is_new) then += latency;
    wait_until(then);
}

static char *behind(const char *path, char *buffer) {
    snprintf(buffer, PATH_MAX, "%s%s", root, path);
    return buffer;
}
#define BEHIND(path) char buffer[PATH_MAX]; const char *real = behind(path, buffer)
#define RESULT(call) return (call) < 0 ? -errno : 0

/* What a listing has shown is known; the kernel keeps it for as long as it is told to. */
static int do_getattr(const char *path, struct stat *st, struct fuse_file_info *info) {
    (void)info;
    BEHIND(path);
    RESULT(lstat(real, st));
}

static int do_readdir(const char *path, void *into, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *info,
                      enum fuse_readdir_flags flags) {
    (void)offset; (void)info; (void)flags;
    BEHIND(path);
    DIR *directory = opendir(real);
    if (!directory) return -errno;
    long count = 0;
    for (struct dirent *entry; (entry = readdir(directory)); count++) {
        struct stat st = {.st_ino = entry->d_ino, .st_mode = (mode_t)entry->d_type << 12};
        fill(into, entry->d_name, &st, 0, 0);
    }
    closedir(directory);
    for (long page = 0; page <= count / 5000; page++) request(LIST, 0, 1);
    return 0;
}

static int start(const char *path, int flags, mode_t mode, struct fuse_file_info *info) {
    BEHIND(path);
    int file = open(real, flags & ~O_EXCL & ~O_DIRECT, mode);
    if (file < 0) return -errno;
    struct handle *handle = calloc(1, sizeof *handle);
    handle->file = file;
    info->fh = (uint64_t)handle;
    return 0;
}

static int do_open(const char *path, struct fuse_file_info *info) { return start(path, info->flags, 0, info); }

static int do_create(const char *path, mode_t mode, struct fuse_file_info *info) {
    request(STAT, 0, 1);
    return start(path, info->flags | O_CREAT, mode, info);
}

static int do_read(const char *path, char *into, size_t size, off_t offset, struct fuse_file_info *info) {
    (void)path;
    struct handle *handle = (struct handle *)info->fh;
    ssize_t count = pread(handle->file, into, size, offset);
    /* The kernel reads ahead, and may ask for neighbours in any order. */
    int is_new = !handle->read || llabs(offset - handle->next) > (2 << 20);
    handle->read = 1;
    handle->next = offset + size;
    request(GET, count > 0 ? count : 0, is_new);
    return count < 0 ? -errno : (int)count;
}

static int do_write(const char *path, const char *from, size_t size, off_t offset, struct fuse_file_info *info) {
    (void)path;
    struct handle *handle = (struct handle *)info->fh;
    ssize_t count = pwrite(handle->file, from, size, offset);
    if (count > 0) handle->written += count;
    return count < 0 ? -errno : (int)count;
}

static int do_flush(const char *path, struct fuse_file_info *info) {
    (void)path;
    struct handle *handle = (struct handle *)info->fh;
    if (handle->written) request(PUT, handle->written, 1);
    handle->written = 0;
    return 0;
}

static int do_fsync(const char *path, int only_data, struct fuse_file_info *info) {
    (void)only_data;
    return do_flush(path, info);
}

static int do_release(const char *path, struct fuse_file_info *info) {
    (void)path;
    struct handle *handle = (struct handle *)info->fh;
    close(handle->file);
    free(handle);
    return 0;
}

static int do_unlink(const char *path) { BEHIND(path); request(DELETE, 0, 1); RESULT(unlink(real)); }
static int do_mkdir(const char *path, mode_t mode) { BEHIND(path); request(PUT, 0, 1); RESULT(mkdir(real, mode)); }
static int do_rmdir(const char *path) { BEHIND(path); request(DELETE, 0, 1); RESULT(rmdir(real)); }

static int do_rename(const char *from, const char *to, unsigned int flags) {
    char other[PATH_MAX];
    BEHIND(from);
    (void)flags;
    request(COPY, 0, 1);
    request(DELETE, 0, 1);
    RESULT(rename(real, behind(to, other)));
}

static int do_truncate(const char *path, off_t size, struct fuse_file_info *info) {
    BEHIND(path);
    if (info) RESULT(ftruncate(((struct handle *)info->fh)->file, size));
    RESULT(truncate(real, size));
}

static int do_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *info) {
    (void)path; (void)times; (void)info;
    return 0;
}

static void *do_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    connection->max_background = 400;
    connection->congestion_threshold = 400;
    config->entry_timeout = config->attr_timeout = 60;
    config->negative_timeout = 0;
    return NULL;
}

static void do_destroy(void *data) {
    (void)data;
    FILE *file = getenv("COUNTS") ? fopen(getenv("COUNTS"), "w") : NULL;
    if (!file) return;
    for (int what = 0; what < 2; what++) {
        fprintf(file, "%s\"%s\": {", what ? ", " : "{", what ? "bytes" : "requests");
        for (int kind = 0; kind < KINDS; kind++)
            fprintf(file, "%s\"%s\": %ld", kind ? ", " : "", names[kind], what ? moved[kind] : requests[kind]);
        fputs("}", file);
    }
    fputs("}\n", file);
    fclose(file);
}

static const struct fuse_operations operations = {
    .getattr = do_getattr, .readdir = do_readdir, .open = do_open, .create = do_create, .read = do_read,
    .write = do_write, .flush = do_flush, .fsync = do_fsync, .release = do_release, .unlink = do_unlink,
    .mkdir = do_mkdir, .rmdir = do_rmdir, .rename = do_rename, .truncate = do_truncate, .utimens = do_utimens,
    .init = do_init, .destroy = do_destroy,
};

int main(int count, char **arguments) {
    if (count < 3) return 2;
    root = realpath(arguments[1], NULL);
    latency = getenv("LATENCY") ? atof(getenv("LATENCY")) : 0;
    bandwidth = getenv("BANDWIDTH") ? atof(getenv("BANDWIDTH")) : 0;
    arguments[1] = arguments[0];
    return root ? fuse_main(count - 1, arguments + 1, &operations, NULL) : 1;
}
