/* Mapped files that another process truncates: reading beyond the new end raises SIGBUS, which ends the process. This
 * handler replaces such pages by zeros and the read continues; weights.py then detects and reports that the file changed.
 * If this module was not compiled, the signal ends the process.
 *
 * Only registered ranges are replaced. Any other SIGBUS is passed to the previous handler. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

enum { RANGES = 4096 };

/* Changed with the GIL held; the handler reads it on any thread: an empty range has end 0. */
static struct {
    volatile uintptr_t start, end;
} ranges[RANGES];
static volatile sig_atomic_t installed = 0;
static volatile sig_atomic_t faults = 0;
static struct sigaction before;
static uintptr_t page;

static void handle(int number, siginfo_t *info, void *context)
{
    (void)context;
    const uintptr_t at = (uintptr_t)info->si_addr;
    for (int index = 0; index < RANGES; index++) {
        if (at < ranges[index].start || at >= ranges[index].end)
            continue;
        const uintptr_t first = at - at % page; /* all later pages are beyond the end of the file too */
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        if (mmap((void *)first, ranges[index].end - first, PROT_READ, flags, -1, 0) == MAP_FAILED)
            break;
        faults = faults + 1;
        return;
    }
    sigaction(number, &before, NULL); /* the read is repeated under the previous handler */
    installed = 0;
}

static PyObject *guard(PyObject *self, PyObject *args)
{
    unsigned long long start, length;
    (void)self;
    if (!PyArg_ParseTuple(args, "KK", &start, &length))
        return NULL;
    if (!installed) {
        struct sigaction action = {0};
        page = (uintptr_t)sysconf(_SC_PAGESIZE);
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        if (sigaction(SIGBUS, &action, &before) != 0)
            Py_RETURN_FALSE;
        installed = 1;
    }
    for (int index = 0; index < RANGES; index++) {
        if (ranges[index].end != 0)
            continue;
        ranges[index].start = (uintptr_t)start;
        ranges[index].end = (uintptr_t)((start + length + page - 1) / page * page);
        Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

static PyObject *release(PyObject *self, PyObject *args)
{
    unsigned long long start;
    (void)self;
    if (!PyArg_ParseTuple(args, "K", &start))
        return NULL;
    for (int index = 0; index < RANGES; index++)
        if (ranges[index].end != 0 && ranges[index].start == (uintptr_t)start)
            ranges[index].end = 0;
    Py_RETURN_NONE;
}

static PyObject *count(PyObject *self, PyObject *args)
{
    (void)self;
    (void)args;
    return PyLong_FromLong((long)faults);
}

static PyMethodDef methods[] = {
    {"guard", guard, METH_VARARGS, "guard(address, bytes): read missing pages of a mapped file as zeros."},
    {"release", release, METH_VARARGS, "release(address): stop guarding a map."},
    {"faults", count, METH_NOARGS, "Number of faults that were replaced by zeros."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pages", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pages(void)
{
    return PyModuleDef_Init(&module);
}
