/* Compiled rounding loops, one output after another: beam search over a block of columns, tabu search, and coordinate
 * descent. beam.py, tabu.py and descent.py are the numpy fallbacks with bit-identical results, which requires that no
 * product is fused with a sum (-ffp-contract=off).
 *
 * Arrays are passed as addresses, because the stable ABI of Python 3.10 has no buffers. Callers check types and sizes.
 */

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

enum { LANES = 16, STRIP = 256 }; /* rows are padded to a multiple of LANES */

static const float BARRED = 3e38f;

/* State of one output. All arrays except `codes` and `best` are padded. */
typedef struct {
    float *rest, *slope, *curve, *up, *down; /* half gradient; 2 scale; scale^2 A_kk; `curve`, infinite if locked */
    int32_t *codes, *best, *barred;          /* barred: locked reverse steps, 2 k + went up */
    const int32_t *low, *high;               /* lowest and highest codes */
} Row;

/* Compute rest += t * line. Return the column of the cheapest step (the first of equals) and its cost in `cost`. The
 * least cost of each strip needs no columns: the column is searched in the strip that has the least. */
FASTEST static Py_ssize_t cheapest(const Row *row, const float *line, float t, Py_ssize_t padded, float *cost)
{
    float *restrict rest = row->rest;
    const float *restrict slope = row->slope, *restrict up = row->up, *restrict down = row->down;
    float least = BARRED;
    Py_ssize_t column = 0;
    for (Py_ssize_t start = 0; start < padded; start += STRIP) {
        const Py_ssize_t end = start + STRIP < padded ? start + STRIP : padded;
        float lanes[LANES], here = BARRED;
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = BARRED;
        for (Py_ssize_t k = start; k < end; k += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                const float moved = rest[k + lane] + t * line[k + lane];
                const float tilt = slope[k + lane] * moved;
                const float above = up[k + lane] + tilt, below = down[k + lane] - tilt;
                const float lower = above < below ? above : below;
                rest[k + lane] = moved;
                lanes[lane] = lower < lanes[lane] ? lower : lanes[lane];
            }
        for (int lane = 0; lane < LANES; lane++)
            here = lanes[lane] < here ? lanes[lane] : here;
        column = here < least ? start : column;
        least = here < least ? here : least;
    }
    *cost = least;
    for (; least < BARRED; column++) {
        const float tilt = slope[column] * rest[column];
        if (up[column] + tilt == least || down[column] - tilt == least)
            break;
    }
    return column;
}

/* Run the search; the best codes are in row->best. */
static void search_row(const Row *row, const float *a, const float *zeros, Py_ssize_t columns, Py_ssize_t padded,
                       Py_ssize_t steps, Py_ssize_t tenure)
{
    int32_t *codes = row->codes;
    const float *line = zeros;
    double error = 0.0, least = 0.0; /* relative to the initial codes */
    float t = 0.0f, cost;
    memcpy(row->best, codes, columns * sizeof *codes);
    for (Py_ssize_t i = 0; i < tenure; i++)
        row->barred[i] = -1;
    for (Py_ssize_t step = 0; step < steps; step++) {
        const Py_ssize_t k = cheapest(row, line, t, padded, &cost);
        if (!(cost < BARRED))
            break; /* all steps are locked */
        const float tilt = row->slope[k] * row->rest[k];
        const int went_up = row->up[k] + tilt <= row->down[k] - tilt;
        int32_t *place = row->barred + step % tenure;
        if (*place >= 0) {
            const int32_t freed = *place >> 1;
            if (*place & 1)
                row->down[freed] = codes[freed] > row->low[freed] ? row->curve[freed] : INFINITY;
            else
                row->up[freed] = codes[freed] < row->high[freed] ? row->curve[freed] : INFINITY;
        }
        codes[k] += went_up ? 1 : -1;
        row->up[k] = went_up && codes[k] < row->high[k] ? row->curve[k] : INFINITY;
        row->down[k] = !went_up && codes[k] > row->low[k] ? row->curve[k] : INFINITY;
        *place = (int32_t)(2 * k + went_up);
        t = 0.5f * (went_up ? row->slope[k] : -row->slope[k]);
        line = a + k * padded;
        error += cost;
        if (error < least) {
            least = error;
            memcpy(row->best, codes, columns * sizeof *codes);
        }
    }
}

#define AT(type, name) ((type *)(uintptr_t)(name))

/* tabu(a, rest, scale, dead, codes, low, high, outputs, columns, padded, apart, first, last, steps, tenure)
 *
 * a: float32 (groups, columns, padded). rest, scale: float32 (groups, outputs, padded). dead: float32 (groups, padded),
 * 0 or BARRED. codes: int32 (groups, outputs, columns), changed in place. low, high: int32 rows of columns, `apart` from
 * one output to the next, 0 or columns. Rows first to last of groups x outputs. */
static PyObject *tabu(PyObject *self, PyObject *args)
{
    unsigned long long a, rest, scale, dead, codes, low, high;
    Py_ssize_t outputs, columns, padded, apart, first, last, steps, tenure;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKKKnnnnnnnn", &a, &rest, &scale, &dead, &codes, &low, &high, &outputs, &columns,
                          &padded, &apart, &first, &last, &steps, &tenure))
        return NULL;
    float *space = PyMem_Malloc((5 * padded + columns + tenure) * sizeof *space);
    if (!space)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    float *zeros = space + 4 * padded;
    memset(zeros, 0, padded * sizeof *zeros);
    for (Py_ssize_t i = first; i < last; i++) {
        const Py_ssize_t group = i / outputs;
        const float *matrix = AT(const float, a) + group * columns * padded;
        const float *size = AT(const float, scale) + i * padded, *off = AT(const float, dead) + group * padded;
        Row row = {AT(float, rest) + i * padded,   space, space + padded, space + 2 * padded, space + 3 * padded,
                   AT(int32_t, codes) + i * columns, (int32_t *)(space + 5 * padded),
                   (int32_t *)(space + 5 * padded) + columns,
                   AT(const int32_t, low) + i * apart, AT(const int32_t, high) + i * apart};
        for (Py_ssize_t k = 0; k < padded; k++) {
            const int there = k < columns && off[k] == 0.0f;
            row.slope[k] = 2.0f * size[k];
            row.curve[k] = there ? size[k] * size[k] * matrix[k * padded + k] : 0.0f;
            row.up[k] = there && row.codes[k] < row.high[k] ? row.curve[k] : INFINITY;
            row.down[k] = there && row.codes[k] > row.low[k] ? row.curve[k] : INFINITY;
        }
        search_row(&row, matrix, zeros, columns, padded, steps, tenure);
        memcpy(row.codes, row.best, columns * sizeof *row.codes);
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(space);
    Py_RETURN_NONE;
}

/* State of one output in a block of columns. */
typedef struct {
    Py_ssize_t beams, width;
    const float *weight, *scale, *zero, *low, *high, *pivot, *triangle; /* (width,); triangle: (width, width) */
    float *free, *next;                                    /* (beams, width): optimal unrounded values */
    float *cost, *costs, *choices;                         /* (beams,), (2 beams,), (2 beams,) */
    int32_t *order, *parents;                              /* (beams,), (width, beams) */
    float *codes;                                          /* (width, beams) */
} Beam;

/* Select the `beams` cheapest of 2 beams candidates in ascending order; the first of equals. NaN sorts last. */
static void cheapest_few(const Beam *b)
{
    Py_ssize_t kept = 0;
    for (Py_ssize_t i = 0; i < 2 * b->beams; i++) {
        const float cost = b->costs[i];
        Py_ssize_t at = kept < b->beams ? kept++ : b->beams;
        for (; at > 0 && (cost < b->costs[b->order[at - 1]] || (isnan(b->costs[b->order[at - 1]]) && !isnan(cost))); at--)
            if (at < b->beams)
                b->order[at] = b->order[at - 1];
        if (at < b->beams)
            b->order[at] = (int32_t)i;
    }
}

static inline float within(float code, float low, float high)
{
    code = code < low ? low : code;
    return code > high ? high : code;
}

FASTEST static void carry(const float *restrict from, float *restrict to, float lost, const float *restrict line,
                          Py_ssize_t first, Py_ssize_t width)
{
    for (Py_ssize_t j = first; j < width; j++)
        to[j] = from[j] + lost * line[j];
}

/* Compute the costs of the nearest and the second nearest code of one column for all beams. */
FASTEST static void price(const Beam *b, Py_ssize_t k)
{
    const Py_ssize_t beams = b->beams, width = b->width;
    const float scale = b->scale[k], zero = b->zero[k], each = scale * scale * b->pivot[k];
    const float low = b->low[k], high = b->high[k];
    for (Py_ssize_t i = 0; i < beams; i++) {
        const float ratio = b->free[i * width + k] / scale + zero, near = rintf(ratio), first = within(near, low, high);
        const float second = within(near + (ratio > near ? 1.0f : -1.0f), low, high);
        const float here = ratio - first, there = ratio - second;
        b->choices[i] = first;
        b->choices[beams + i] = second;
        b->costs[i] = b->cost[i] + each * (here * here);
        b->costs[beams + i] = first == second ? INFINITY : b->cost[i] + each * (there * there);
    }
}

static void round_column(Beam *b, Py_ssize_t k)
{
    const Py_ssize_t beams = b->beams, width = b->width;
    const float scale = b->scale[k], zero = b->zero[k];
    price(b, k);
    if (beams == 1)
        b->order[0] = 0;
    else
        cheapest_few(b);
    for (Py_ssize_t i = 0; i < beams; i++) {
        const int32_t pick = b->order[i], parent = pick < beams ? pick : pick - (int32_t)beams;
        const float code = b->choices[pick];
        b->cost[i] = b->costs[pick];
        b->codes[k * beams + i] = code;
        b->parents[k * beams + i] = parent;
        carry(b->free + parent * width, b->next + i * width, b->weight[k] - (code - zero) * scale,
              b->triangle + k * width, k + 1, width);
    }
    float *free = b->free;
    b->free = b->next;
    b->next = free;
}

/* beam(free, weight, scale, zero, low, high, pivots, triangle, cost, codes, began, outputs, beams, width, first, last)
 *
 * float32: free (rows, beams, width), overwritten; weight, scale, zero, low, high (rows, width): low and high are the
 * lowest and highest codes; pivots (groups, width); triangle (groups, width, width); cost (rows, beams), changed in place; codes (rows, beams, width), output. began: int64 (rows,
 * beams), output: the initial beam, numbered over all rows, that each final beam started from. Rows first to last of
 * groups x outputs. */
static PyObject *beam(PyObject *self, PyObject *args)
{
    unsigned long long free, weight, scale, zero, low, high, pivots, triangle, cost, codes, began;
    Py_ssize_t outputs, beams, width, first, last;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKnnnnn", &free, &weight, &scale, &zero, &low, &high, &pivots, &triangle,
                          &cost, &codes, &began, &outputs, &beams, &width, &first, &last))
        return NULL;
    float *space = PyMem_Malloc((3 * beams * width + 5 * beams) * sizeof *space);
    if (!space)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    float *next = space, *steps = space + beams * width, *pair = space + 3 * beams * width;
    for (Py_ssize_t row = first; row < last; row++) {
        const Py_ssize_t group = row / outputs;
        Beam b = {beams, width,
                  AT(const float, weight) + row * width, AT(const float, scale) + row * width,
                  AT(const float, zero) + row * width, AT(const float, low) + row * width,
                  AT(const float, high) + row * width, AT(const float, pivots) + group * width,
                  AT(const float, triangle) + group * width * width,
                  AT(float, free) + row * beams * width, next,
                  AT(float, cost) + row * beams, pair, pair + 2 * beams,
                  (int32_t *)(pair + 4 * beams), (int32_t *)(steps + beams * width), steps};
        for (Py_ssize_t k = 0; k < width; k++)
            round_column(&b, k);
        for (Py_ssize_t i = 0; i < beams; i++) {
            Py_ssize_t at = i;
            float *made = AT(float, codes) + (row * beams + i) * width;
            for (Py_ssize_t k = width - 1; k >= 0; k--) {
                made[k] = b.codes[k * beams + at];
                at = b.parents[k * beams + at];
            }
            AT(int64_t, began)[row * beams + i] = row * beams + at;
        }
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(space);
    Py_RETURN_NONE;
}

/* rest += t * line */
FASTEST static void add_line(float *restrict rest, const float *restrict line, float t, Py_ssize_t columns)
{
    for (Py_ssize_t k = 0; k < columns; k++)
        rest[k] += t * line[k];
}

/* Return the first column from `k` on whose code is not optimal given the others, with its optimum in `best`; or
 * `columns`. */
FASTEST static Py_ssize_t next_to_move(const float *codes, const float *rest, const float *step, const float *low,
                                       const float *high, Py_ssize_t k, Py_ssize_t columns, float *best)
{
    for (; k < columns; k++) {
        float code = rintf(codes[k] + rest[k] * step[k]);
        code = code < low[k] ? low[k] : code;
        code = code > high[k] ? high[k] : code;
        if (code != codes[k]) {
            *best = code;
            break;
        }
    }
    return k;
}

/* descend(a, rest, step, scale, codes, low, high, outputs, columns, apart, first, last, sweeps)
 *
 * float32: a (groups, columns, columns); rest, step, scale and codes (groups, outputs, columns); rest is overwritten,
 * codes are changed in place. low, high: float32 rows of columns, `apart` from one output to the next, 0 or columns. Rows
 * first to last of groups x outputs. */
static PyObject *descend(PyObject *self, PyObject *args)
{
    unsigned long long a, rest, step, scale, codes, low, high;
    Py_ssize_t outputs, columns, apart, first, last, sweeps;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKKKnnnnnn", &a, &rest, &step, &scale, &codes, &low, &high, &outputs, &columns,
                          &apart, &first, &last, &sweeps))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = first; row < last; row++) {
        const float *matrix = AT(const float, a) + row / outputs * columns * columns;
        const Py_ssize_t at = row * columns;
        float *left = AT(float, rest) + at, *mine = AT(float, codes) + at, best = 0.0f;
        for (Py_ssize_t sweep = 0, moved = 1; sweep < sweeps && moved; sweep++) {
            moved = 0;
            for (Py_ssize_t k = 0;; k++) {
                k = next_to_move(mine, left, AT(const float, step) + at, AT(const float, low) + row * apart,
                                 AT(const float, high) + row * apart, k, columns, &best);
                if (k == columns)
                    break;
                add_line(left, matrix + k * columns, (best - mine[k]) * AT(const float, scale)[at + k], columns);
                mine[k] = best;
                moved = 1;
            }
        }
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"beam", beam, METH_VARARGS,
     "beam(free, weight, scale, zero, low, high, pivots, triangle, cost, codes, began, outputs, beams, width, first, "
     "last)"},
    {"descend", descend, METH_VARARGS,
     "descend(a, rest, step, scale, codes, low, high, outputs, columns, apart, first, last, sweeps)"},
    {"tabu", tabu, METH_VARARGS,
     "tabu(a, rest, scale, dead, codes, low, high, outputs, columns, padded, apart, first, last, steps, tenure)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_search", "Compiled loops of rounding.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__search(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "VERSION", 2) < 0) /* as in sbonnx/system/native.py */
        Py_CLEAR(made);
    return made;
}
