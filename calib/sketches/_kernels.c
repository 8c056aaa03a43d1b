/* The loops of calibration without a fast numpy function: minimum and maximum in one pass, a histogram of leading bits,
 * and the errors of candidate ranges. kernels.py and observers/value_errors.py have the same in numpy, with equal
 * results, for installations without compiled code. No product may be fused with a sum (-ffp-contract=off).
 *
 * Arrays are passed as addresses: the stable ABI of Python 3.10 has no buffers. The callers check types and sizes. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define FASTEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FASTEST
#endif

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#define HAS_SIFT 1
#else
#define HAS_SIFT 0
#endif

enum { BLOCK = 4096, PAGES = 512, TABLES = 2 };

/* Maps float bits to integers of the same order: the sign decides whether the other bits are flipped. Self-inverse. */
static inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

FASTEST static void widen(const int32_t *x, Py_ssize_t n, int32_t *lo, int32_t *hi)
{
    int32_t low = *lo, high = *hi;
    for (Py_ssize_t i = 0; i < n; i++) {
        int32_t k = ordered(x[i]);
        low = k < low ? k : low;
        high = k > high ? k : high;
    }
    *lo = low;
    *hi = high;
}

static int is_finite(int32_t lo, int32_t hi)
{
    const int32_t infinity = 0x7f800000;
    return hi < infinity && lo > ordered((int32_t)0xff800000);
}

#if HAS_SIFT
/* Widens the range and copies values other than +0.0, which is frequent after a ReLU; returns the number of copied
 * values. n is a multiple of 16. */
__attribute__((target("avx512f"))) static Py_ssize_t sift(const int32_t *x, Py_ssize_t n, int32_t *kept, int32_t *lo,
                                                          int32_t *hi)
{
    Py_ssize_t k = 0;
    __m512i low = _mm512_set1_epi32(*lo), high = _mm512_set1_epi32(*hi);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (Py_ssize_t i = 0; i < n; i += 16) {
        __m512i v = _mm512_loadu_si512(x + i);
        __m512i key = _mm512_xor_si512(v, _mm512_and_si512(_mm512_srai_epi32(v, 31), magnitude));
        __mmask16 used = _mm512_test_epi32_mask(v, v);
        low = _mm512_min_epi32(low, key);
        high = _mm512_max_epi32(high, key);
        _mm512_storeu_si512(kept + k, _mm512_maskz_compress_epi32(used, v));
        k += __builtin_popcount(used);
    }
    *lo = _mm512_reduce_min_epi32(low);
    *hi = _mm512_reduce_max_epi32(high);
    return k;
}
#endif

/* Counts into two tables alternately: in a single one, equal neighbours would stall on the same counter. */
static void tally(const uint32_t *x, Py_ssize_t n, int shift, uint32_t *table, size_t size)
{
    uint32_t *a = table, *b = a + size;
    Py_ssize_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint64_t two, more;
        memcpy(&two, x + i, sizeof two);
        memcpy(&more, x + i + 2, sizeof more);
        a[(uint32_t)two >> shift]++;
        b[two >> (32 + shift)]++;
        a[(uint32_t)more >> shift]++;
        b[more >> (32 + shift)]++;
    }
    for (; i < n; i++)
        a[x[i] >> shift]++;
}

/* Widens the range and counts. `fast`: whether the processor supports `sift`. */
static void survey(const int32_t *x, Py_ssize_t n, int shift, uint32_t *table, size_t size, int32_t *lo, int32_t *hi,
                   int fast)
{
#if HAS_SIFT
    int32_t kept[BLOCK + 16];
    for (; fast && n >= 16; ) {
        Py_ssize_t length = n < BLOCK ? n & ~(Py_ssize_t)15 : BLOCK;
        Py_ssize_t k = sift(x, length, kept, lo, hi);
        table[0] += (uint32_t)(length - k);
        tally((const uint32_t *)kept, k, shift, table, size);
        x += length;
        n -= length;
    }
#else
    (void)fast;
#endif
    for (Py_ssize_t at = 0; at < n; at += BLOCK) {
        Py_ssize_t length = n - at < BLOCK ? n - at : BLOCK;
        widen(x + at, length, lo, hi);
        tally((const uint32_t *)x + at, length, shift, table, size);
    }
}

/* Number of counted values of a page. */
static uint64_t sum(const uint32_t *table, size_t bins, int page)
{
    uint64_t total = 0;
    for (int t = 0; t < TABLES; t++) {
        const uint32_t *from = table + (t * PAGES + page) * bins;
        uint32_t part = 0; /* cannot overflow: at most the length of one array */
        for (size_t k = 0; k < bins; k++)
            part += from[k];
        total += part;
    }
    return total;
}

/* Adds the tables to the counts of one row, and sets them to zero. */
static void settle(uint32_t *table, size_t bins, const int16_t *slots, int64_t *counts)
{
    for (int page = 0; page < PAGES; page++) {
        if (slots[page] < 0)
            continue;
        int64_t *to = counts + slots[page] * bins;
        for (int t = 0; t < TABLES; t++) {
            uint32_t *from = table + (t * PAGES + page) * bins;
            for (size_t k = 0; k < bins; k++)
                to[k] += from[k];
            memset(from, 0, bins * sizeof *from);
        }
    }
}

#define AT(type, name) ((type *)(uintptr_t)(name))

/* extremes(x, rows, columns, lo, hi) -> whether everything is finite. x: float32 (rows, columns); lo, hi: float32. */
static PyObject *extremes(PyObject *self, PyObject *args)
{
    unsigned long long x, lo, hi;
    Py_ssize_t rows, columns;
    int all = 1;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnnKK", &x, &rows, &columns, &lo, &hi))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < rows; row++) {
        int32_t low = INT32_MAX, high = INT32_MIN;
        widen(AT(const int32_t, x) + row * columns, columns, &low, &high);
        all &= is_finite(low, high);
        AT(int32_t, lo)[row] = ordered(low);
        AT(int32_t, hi)[row] = ordered(high);
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(all);
}

static int can_sift; /* set once, when the module is loaded */

/* Counts one row. Returns 0 if it is done; 1 if pages are missing or 2 if it is not finite, without counting it. */
static int take(const int32_t *x, Py_ssize_t n, int mantissa, const int16_t *slots, int64_t *counts, uint32_t *table,
                int32_t *lo, int32_t *hi, uint8_t *missing)
{
    const size_t bins = (size_t)1 << mantissa, size = bins * PAGES;
    int32_t low = INT32_MAX, high = INT32_MIN;
    uint64_t housed = 0;
    survey(x, n, 23 - mantissa, table, size, &low, &high, can_sift);
    *lo = ordered(low);
    *hi = ordered(high);
    for (int page = 0; page < PAGES; page++)
        if (slots[page] >= 0)
            housed += sum(table, bins, page);
    const int fine = is_finite(low, high);
    if (fine && housed == (uint64_t)n) {
        settle(table, bins, slots, counts);
        return 0;
    }
    for (int page = 0; fine && missing && page < PAGES; page++)
        if (slots[page] < 0 && sum(table, bins, page))
            missing[page] = 1;
    memset(table, 0, TABLES * size * sizeof *table);
    return fine ? 1 : 2;
}

/* count(x, rows, columns, mantissa, slots, counts, n_slots, table, lo, hi, missing, start) -> row at which it stopped.
 *
 * Counts rows from `start` on. It stops before a row whose pages are missing (marked in `missing`), to be called again
 * from there, and at a row that is not finite (-1 - row). */
static PyObject *count(PyObject *self, PyObject *args)
{
    unsigned long long x, slots, counts, table, lo, hi, missing;
    Py_ssize_t rows, columns, n_slots, row;
    int mantissa, found = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnniKKnKKKKn", &x, &rows, &columns, &mantissa, &slots, &counts, &n_slots, &table, &lo,
                          &hi, &missing, &row))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (; row < rows; row++) {
        found = take(AT(const int32_t, x) + row * columns, columns, mantissa, AT(const int16_t, slots),
                     AT(int64_t, counts) + row * (n_slots << mantissa), AT(uint32_t, table), AT(int32_t, lo) + row,
                     AT(int32_t, hi) + row, AT(uint8_t, missing));
        if (found)
            break;
    }
    Py_END_ALLOW_THREADS
    return PyLong_FromSsize_t(found == 2 ? -1 - row : row);
}

/* panel(jobs, n, table, lo, hi, status): processes many tensors in one call, with the GIL released.
 *
 * jobs: int64 (n, 5): address of the values, their number, bits of the mantissa (-1: extremes only), addresses of slots
 * and counts. lo, hi: float32 (n,). status: uint8 (n,), 0 if the tensor is done, else the return value of `take`. */
static PyObject *panel(PyObject *self, PyObject *args)
{
    unsigned long long jobs, table, lo, hi, status;
    Py_ssize_t n;
    (void)self;
    if (!PyArg_ParseTuple(args, "KnKKKK", &jobs, &n, &table, &lo, &hi, &status))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++) {
        const int64_t *job = AT(const int64_t, jobs) + 5 * i;
        int32_t *low = AT(int32_t, lo) + i, *high = AT(int32_t, hi) + i;
        if (job[2] < 0) {
            int32_t a = INT32_MAX, b = INT32_MIN;
            widen(AT(const int32_t, job[0]), job[1], &a, &b);
            *low = ordered(a);
            *high = ordered(b);
            AT(uint8_t, status)[i] = is_finite(a, b) ? 0 : 2;
        } else {
            AT(uint8_t, status)[i] = take(AT(const int32_t, job[0]), job[1], (int)job[2], AT(const int16_t, job[3]),
                                          AT(int64_t, job[4]), AT(uint32_t, table), low, high, NULL);
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Errors of candidate ranges for rows of single values. Squares are summed in the order of numpy: 8 lanes in blocks of
 * at most 128 values, and the sums of halves above that. */

enum { SUMMED = 128, LANES = 8 };

#define SUM_BLOCK(type, name)                                                                                         \
    static inline type name(const type *x, Py_ssize_t n)                                                              \
    {                                                                                                                 \
        Py_ssize_t i = 0;                                                                                             \
        type total = 0;                                                                                               \
        if (n >= LANES) {                                                                                             \
            type lane[LANES];                                                                                         \
            for (int j = 0; j < LANES; j++)                                                                           \
                lane[j] = x[j];                                                                                       \
            for (i = LANES; i + LANES <= n; i += LANES)                                                               \
                for (int j = 0; j < LANES; j++)                                                                       \
                    lane[j] += x[i + j];                                                                              \
            total = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));        \
        }                                                                                                             \
        for (; i < n; i++)                                                                                            \
            total += x[i];                                                                                            \
        return total;                                                                                                 \
    }

SUM_BLOCK(float, sum_floats)
SUM_BLOCK(double, sum_doubles)

static Py_ssize_t half(Py_ssize_t n) { return n / 2 - n / 2 % LANES; }

/* Integers of a candidate range: 1 / scale or scale, lowest and highest (minus the zero point for `step_sum`). */
typedef struct {
    float scale, lowest, highest, zero;
} Grid;

/* Sum of weights * (u - clip(rint(u)))^2 with u = x * scale, in float32. */
FASTEST static float step_block(const float *restrict x, const float *restrict weights, Py_ssize_t n, Grid grid)
{
    float squares[SUMMED];
    for (Py_ssize_t i = 0; i < n; i++) {
        const float u = x[i] * grid.scale;
        float q = rintf(u);
        q = q < grid.lowest ? grid.lowest : q;
        q = q > grid.highest ? grid.highest : q;
        const float off = u - q;
        squares[i] = off * off * weights[i];
    }
    return sum_floats(squares, n);
}

static float step_sum(const float *x, const float *weights, Py_ssize_t n, Grid grid)
{
    if (n <= SUMMED)
        return step_block(x, weights, n, grid);
    const Py_ssize_t k = half(n);
    const float first = step_sum(x, weights, k, grid);
    return first + step_sum(x + k, weights + k, n - k, grid);
}

/* Sum of counts * (x - dequantize(quantize(x)))^2: values as `QParams` computes them, squares in float64. */
FASTEST static double value_block(const float *restrict x, const double *restrict counts, Py_ssize_t n, Grid grid)
{
    double squares[SUMMED];
    for (Py_ssize_t i = 0; i < n; i++) {
        float q = rintf(x[i] / grid.scale) + grid.zero;
        q = q < grid.lowest ? grid.lowest : q;
        q = q > grid.highest ? grid.highest : q;
        const float near = (q - grid.zero) * grid.scale;
        const double off = (double)x[i] - (double)near;
        squares[i] = off * off * counts[i];
    }
    return sum_doubles(squares, n);
}

static double value_sum(const float *x, const double *counts, Py_ssize_t n, Grid grid)
{
    if (n <= SUMMED)
        return value_block(x, counts, n, grid);
    const Py_ssize_t k = half(n);
    const double first = value_sum(x, counts, k, grid);
    return first + value_sum(x + k, counts + k, n - k, grid);
}

/* The largest x at which clipping, sum over y > x of counts * (y - x)^2, costs more than `budget`; 0 if there is none.
 * Values are in ascending order; `step` -1 reads them from the last one, 1 the negated values from the first one. */
static double clipping_end(const float *x, const double *counts, Py_ssize_t n, int step, double budget)
{
    double count = 0.0, total = 0.0, squares = 0.0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const Py_ssize_t k = step > 0 ? i : n - 1 - i;
        const double y = step > 0 ? -(double)x[k] : (double)x[k];
        if (!(y > 0.0))
            break;
        const double first = counts[k] * y;
        count += counts[k];
        total += first;
        squares += first * y;
        if (squares - 2.0 * y * total + y * y * count > budget)
            return y;
    }
    return 0.0;
}

/* step_errors(x, weights, rows, columns, own, inverse, lowest, highest, candidates, sums)
 *
 * x: float32 (rows, columns). weights: float32 (rows, columns), or (1, columns) without `own`. inverse, lowest, highest,
 * sums: float32 (candidates, rows). */
static PyObject *step_errors(PyObject *self, PyObject *args)
{
    unsigned long long x, weights, inverse, lowest, highest, sums;
    Py_ssize_t rows, columns, candidates;
    int own;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnpKKKnK", &x, &weights, &rows, &columns, &own, &inverse, &lowest, &highest,
                          &candidates, &sums))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < rows; row++)
        for (Py_ssize_t at = row; at < candidates * rows; at += rows) {
            const Grid grid = {AT(const float, inverse)[at], AT(const float, lowest)[at], AT(const float, highest)[at],
                               0.0f};
            AT(float, sums)[at] = step_sum(AT(const float, x) + row * columns,
                                           AT(const float, weights) + (own ? row * columns : 0), columns, grid);
        }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* value_errors(x, counts, rows, columns, own, scale, zero, qmin, qmax, sums)
 *
 * x: float32 (rows, columns). counts: float64 (rows, columns), or (1, columns) without `own`. scale, zero: float32
 * (rows,). sums: float64 (rows,). */
static PyObject *value_errors(PyObject *self, PyObject *args)
{
    unsigned long long x, counts, scale, zero, sums;
    Py_ssize_t rows, columns;
    int own, qmin, qmax;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnpKKiiK", &x, &counts, &rows, &columns, &own, &scale, &zero, &qmin, &qmax, &sums))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < rows; row++) {
        const Grid grid = {AT(const float, scale)[row], (float)qmin, (float)qmax, AT(const float, zero)[row]};
        AT(double, sums)[row] = value_sum(AT(const float, x) + row * columns,
                                          AT(const double, counts) + (own ? row * columns : 0), columns, grid);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* clipping_ends(x, counts, rows, columns, own, budget, lo, hi): as `clipping_end`, for the negated values and the values.
 *
 * x: float32 (rows, columns), ascending. counts: float64 (rows, columns), or (1, columns) without `own`. budget, lo, hi:
 * float64 (rows,). */
static PyObject *clipping_ends(PyObject *self, PyObject *args)
{
    unsigned long long x, counts, budget, lo, hi;
    Py_ssize_t rows, columns;
    int own;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKnnpKKK", &x, &counts, &rows, &columns, &own, &budget, &lo, &hi))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < rows; row++) {
        const float *values = AT(const float, x) + row * columns;
        const double *each = AT(const double, counts) + (own ? row * columns : 0);
        const double most = AT(const double, budget)[row];
        AT(double, lo)[row] = clipping_end(values, each, columns, 1, most);
        AT(double, hi)[row] = clipping_end(values, each, columns, -1, most);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"extremes", extremes, METH_VARARGS, "extremes(x, rows, columns, lo, hi) -> bool"},
    {"count", count, METH_VARARGS,
     "count(x, rows, columns, mantissa, slots, counts, n_slots, table, lo, hi, missing, start) -> int"},
    {"panel", panel, METH_VARARGS, "panel(jobs, n, table, lo, hi, status)"},
    {"step_errors", step_errors, METH_VARARGS,
     "step_errors(x, weights, rows, columns, own, inverse, lowest, highest, candidates, sums)"},
    {"value_errors", value_errors, METH_VARARGS,
     "value_errors(x, counts, rows, columns, own, scale, zero, qmin, qmax, sums)"},
    {"clipping_ends", clipping_ends, METH_VARARGS, "clipping_ends(x, counts, rows, columns, own, budget, lo, hi)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", "Compiled loops of calibration.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
#if HAS_SIFT
    can_sift = __builtin_cpu_supports("avx512f") != 0;
#endif
    return PyModule_Create(&module);
}
