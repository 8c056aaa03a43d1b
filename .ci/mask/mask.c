/* Preloaded into a process: hides AVX-512, VNNI and AMX from onnxruntime and from readers of /proc/cpuinfo.

   Each cpuid instruction of onnxruntime's library, at the offsets that the file MASKED_OFFSETS lists, becomes an illegal
   one, whose signal handler runs cpuid and clears the bits of ebx, ecx and edx of leaf 7 that MASKED_BITS names (three
   hexadecimal numbers). MASKED_CPUINFO is read in place of /proc/cpuinfo. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

static unsigned hidden[3];

static void emulate(int number, siginfo_t *info, void *context) {
    (void)number; (void)info;
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    unsigned leaf = (unsigned)regs[REG_RAX], sub = (unsigned)regs[REG_RCX], a, b, c, d;
    __cpuid_count(leaf, sub, a, b, c, d);
    if (leaf == 7 && sub == 0) {
        b &= ~hidden[0]; c &= ~hidden[1]; d &= ~hidden[2];
    } else if (leaf == 7) {
        a = b = c = d = 0;
    }
    regs[REG_RAX] = a; regs[REG_RBX] = b; regs[REG_RCX] = c; regs[REG_RDX] = d;
    regs[REG_RIP] += 2;
}

static int ours;
int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    static int (*next)(int, const struct sigaction *, struct sigaction *);
    if (!next) next = (int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction");
    if (number == SIGILL && !ours) {
        if (old) memset(old, 0, sizeof *old);
        return 0;
    }
    return next(number, new, old);
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {0};
    const char *bits = getenv("MASKED_BITS");
    if (bits && sscanf(bits, "%x %x %x", &hidden[0], &hidden[1], &hidden[2]) != 3) abort();
    action.sa_sigaction = emulate;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    ours = 1;
    sigaction(SIGILL, &action, NULL);
    ours = 0;
}

static void patch(void *handle) {
    struct link_map *map;
    const char *list = getenv("MASKED_OFFSETS");
    if (!list || dlinfo(handle, RTLD_DI_LINKMAP, &map)) return;
    FILE *file = fopen(list, "r");
    unsigned long offset;
    if (!file) { perror(list); abort(); }
    while (fscanf(file, "%lx", &offset) == 1) {
        unsigned char *at = (unsigned char *)map->l_addr + offset;
        uintptr_t page = (uintptr_t)at & ~4095ul;
        if (at[0] == 0x0f && at[1] == 0x0b) continue;
        if (at[0] != 0x0f || at[1] != 0xa2) { fprintf(stderr, "mask: no cpuid at %lx\n", offset); abort(); }
        mprotect((void *)page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC);
        at[1] = 0x0b;
        mprotect((void *)page, 8192, PROT_READ | PROT_EXEC);
    }
    fclose(file);
}

void *dlopen(const char *name, int flags) {
    static void *(*next)(const char *, int);
    if (!next) next = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    void *handle = next(name, flags);
    if (handle && name && strstr(name, "onnxruntime_pybind11_state")) patch(handle);
    return handle;
}

static const char *place(const char *path) {
    const char *other = getenv("MASKED_CPUINFO");
    return other && path && !strcmp(path, "/proc/cpuinfo") ? other : path;
}
#define OPEN(NAME)                                                             \
    int NAME(const char *path, int flags, ...) {                               \
        static int (*next)(const char *, int, ...);                            \
        if (!next) next = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #NAME); \
        va_list rest; va_start(rest, flags);                                   \
        int mode = va_arg(rest, int); va_end(rest);                            \
        return next(place(path), flags, mode);                                 \
    }
OPEN(open)
OPEN(open64)
