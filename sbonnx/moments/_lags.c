/* Sums of products of a plane with itself, or with another plane of its size, at a lag, over boxes. The moments of a
 * depthwise convolution follow from these sums. lags.py has the numpy fallback with bit-identical results: a sum has
 * LANES float32 lanes on every processor, and no product may be fused with a sum (-ffp-contract=off).
 *
 * Arrays are passed as addresses, because the stable ABI of Python 3.10 has no buffers. Callers check types and sizes.
 */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define FASTEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FASTEST
#endif

enum { LANES = 16, SHORT = 256 }; /* a float32 lane takes SHORT products at most before it is added to a float64 sum */

#if defined(__GNUC__)
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline void add_products(Lanes *sums, const float *a, const float *b)
{
    *sums += *(const Lanes *)a * *(const Lanes *)b;
}

/* Add only lanes with mask 1; the other lanes are read, too, but count as 0. */
static inline void add_some(Lanes *sums, const float *a, const float *b, const float *mask)
{
    *sums += *(const Lanes *)mask * (*(const Lanes *)a * *(const Lanes *)b);
}
#else
typedef struct {
    float each[LANES];
} Lanes;

static inline void add_products(Lanes *sums, const float *a, const float *b)
{
    for (int lane = 0; lane < LANES; lane++)
        sums->each[lane] += a[lane] * b[lane];
}

static inline void add_some(Lanes *sums, const float *a, const float *b, const float *mask)
{
    for (int lane = 0; lane < LANES; lane++)
        sums->each[lane] += mask[lane] * (a[lane] * b[lane]);
}
#endif

/* Offsets of both factors in a plane, row stride, number of rows and columns. */
typedef struct {
    int64_t one, other, stride, rows, columns;
} Box;

static inline float added(const Lanes *sums)
{
    const float *each = (const float *)sums;
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++)
        sum += each[lane];
    return sum;
}

/* Reads up to LANES - 1 numbers past the end of a row, but ignores them. */
FASTEST static double sum_over(const float *a, const float *b, const Box *box, const float *masks)
{
    const int64_t columns = box->columns, whole = columns / LANES * LANES;
    const float *mask = masks + LANES - columns % LANES;
    Lanes sums;
    memset(&sums, 0, sizeof sums);
    double total = 0.0;
    int64_t taken = 0;
    for (int64_t row = 0; row < box->rows; row++, a += box->stride, b += box->stride) {
        for (int64_t x = 0; x < whole; x += LANES)
            add_products(&sums, a + x, b + x);
        if (whole < columns)
            add_some(&sums, a + whole, b + whole, mask);
        taken += columns;
        if (taken >= SHORT * LANES) {
            total += added(&sums);
            memset(&sums, 0, sizeof sums);
            taken = 0;
        }
    }
    return total + added(&sums);
}

/* Make columns `step` apart adjacent; a row becomes (step, each). */
static void put_side_by_side(const float *from, float *to, int64_t height, int64_t width, int64_t step)
{
    const int64_t each = (width + step - 1) / step;
    if (step == 1) {
        memcpy(to, from, height * width * sizeof *to);
        return;
    }
    for (int64_t row = 0; row < height; row++, from += width)
        for (int64_t phase = 0; phase < step; phase++, to += each)
            for (int64_t x = phase, i = 0; x < width; x += step, i++)
                to[i] = from[x];
}

#define AT(type, name) ((type *)(uintptr_t)(name))

/* correlate(one, other, boxes, sums, batch, channels, height, width, step, count)
 *
 * one, other: float32 (batch, channels, height, width), one or two arrays. boxes: int64 (count, 5), for planes in which
 * columns `step` apart were made adjacent. sums: float64 (count, channels), added to. */
static PyObject *correlate(PyObject *self, PyObject *args)
{
    unsigned long long one, other, boxes, sums;
    Py_ssize_t batch, channels, height, width, step, count;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKnnnnnn", &one, &other, &boxes, &sums, &batch, &channels, &height, &width, &step,
                          &count))
        return NULL;
    const Py_ssize_t each = (width + step - 1) / step, size = height * each * step;
    float *space = PyMem_Calloc(2 * (size + LANES), sizeof *space);
    if (!space)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    float masks[2 * LANES] = {0};
    for (int lane = 0; lane < LANES; lane++)
        masks[lane] = 1.0f;
    for (Py_ssize_t plane = 0; plane < batch * channels; plane++) {
        float *mine = space, *second = one == other ? space : space + size + LANES;
        put_side_by_side(AT(const float, one) + plane * height * width, mine, height, width, step);
        if (one != other)
            put_side_by_side(AT(const float, other) + plane * height * width, second, height, width, step);
        double *total = AT(double, sums) + plane % channels;
        for (Py_ssize_t i = 0; i < count; i++) {
            const Box *box = AT(const Box, boxes) + i;
            total[i * channels] += sum_over(mine + box->one, second + box->other, box, masks);
        }
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(space);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"correlate", correlate, METH_VARARGS,
     "correlate(one, other, boxes, sums, batch, channels, height, width, step, count)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_lags", "Compiled sums of products a lag apart.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__lags(void) { return PyModule_Create(&module); }
