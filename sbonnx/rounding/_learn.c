/* Adam steps of AdaRound, one output after another. choices.py is the numpy fallback with bit-identical results:
 * products and their sums are exact in float64 in any order, because both factors are multiples of powers of two that
 * choices.py chooses; everything else is a sequence of float32 operations, none of which may be fused
 * (-ffp-contract=off).
 *
 * A weight that has reached one of its two codes stays there: the choice is clipped, so its gradient is 0, and its
 * momentum points further out. Such weights are frozen. All outputs of a block are processed together until few weights
 * of an output are left; that output then continues separately with the rows and columns of these weights. The results
 * of an output depend neither on other outputs, nor on the block, nor on threads. */

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define FASTEST __attribute__((target_clones("avx512f", "avx2", "default")))
#define EXACT FASTEST __attribute__((optimize("fp-contract=fast"))) /* exact sums may be fused with products */
#else
#define FASTEST
#define EXACT
#endif

#define ZETA 1.1f
#define GAMMA -0.1f
#define SPREAD (ZETA - GAMMA) /* as in choices.py */

enum {
    WIDE = 16,  /* columns of a panel */
    TALL = 8,   /* outputs that are multiplied together */
    BLOCK = 64, /* outputs that are processed together, so that a panel is read once */
    LANES = 16, /* row padding of an output that is processed separately */
    LOOK = 25,  /* interval in steps at which weights are frozen */
    ALONE = 3   /* cost of a product for a separate output relative to one in a block */
};

/* Columns that are multiplied together. */
#if defined(__GNUC__)
enum { PART = 8 };
typedef double Part __attribute__((vector_size(8 * PART), aligned(8), may_alias));
typedef float Short __attribute__((vector_size(4 * PART), aligned(4), may_alias));
#define IN_DOUBLE(x) __builtin_convertvector(x, Part)
#else
enum { PART = 1 };
typedef double Part;
typedef float Short;
#define IN_DOUBLE(x) ((double)(x))
#endif

/* Data shared by all outputs of a group. */
typedef struct {
    Py_ssize_t columns, padded, steps;
    double magic;          /* adding and subtracting it rounds to the step of dequantized values */
    const float *panels;   /* (padded / WIDE, columns, WIDE) */
    const float *schedule; /* (steps, 4): exponent and strength of the regularizer, rate, factor of squares */
} Task;

/* State of one output. `value` is the choice in units of the output's first scale, rounded. */
typedef struct {
    float *u, *mean, *square, *sigmoid, *curve, *ratio;
    double *value, *product, *rest;
} Row;

/* A separate output: its `left` weights that are not frozen, and their rows and columns of the matrix. */
typedef struct {
    Py_ssize_t left, width;
    Row row;         /* (width,) */
    float *lines;    /* (left, width) */
    int32_t *places; /* indices in the output, (left,) */
} Few;

/* e^x for x in [-87, 88]; other x are clipped to this range, NaN to -87. Relative error 2e-7. */
static inline float exponential(float x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to integers */
    x = x > -87.0f ? x : -87.0f;
    x = x < 88.0f ? x : 88.0f;
    const float n = (x * 1.44269504f + magic) - magic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* The natural logarithm of x in [0, 1]; about -88 for 0. */
static inline float logarithm(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int32_t shifted = bits - 0x3f3504f3; /* so that the mantissa is between sqrt(1/2) and sqrt(2) */
    const float n = (float)(shifted >> 23);
    const int32_t rest = (shifted & 0x007fffff) + 0x3f3504f3;
    float m;
    memcpy(&m, &rest, sizeof m);
    const float s = (m - 1.0f) / (m + 1.0f), z = s * s;
    return n * 0.693147181f + 2.0f * s * (1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7))));
}

static inline float choice(float sigmoid)
{
    float h = sigmoid * SPREAD + GAMMA;
    h = h < 0.0f ? 0.0f : h;
    return h > 1.0f ? 1.0f : h;
}

/* Compute h of u and its sigmoid. */
FASTEST static void look_at(const float *restrict u, const float *restrict ratio, float *restrict sigmoid,
                            double *restrict value, double magic, Py_ssize_t count)
{
    for (Py_ssize_t k = 0; k < count; k++) {
        const float s = 1.0f / (1.0f + exponential(-u[k]));
        sigmoid[k] = s;
        value[k] = ((double)(choice(s) * ratio[k]) + magic) - magic;
    }
}

/* Compute the gradient of error and regularizer by u; overwrites the sigmoid. */
FASTEST static void slope_of(const double *restrict product, const double *restrict rest, const float *restrict curve,
                             float *restrict sigmoid, float exponent, float strength, Py_ssize_t count)
{
    for (Py_ssize_t k = 0; k < count; k++) {
        const float s = sigmoid[k], h = choice(s), off = 2.0f * h - 1.0f;
        const float size = strength * exponential(exponent * logarithm(fabsf(off)));
        const float slope = (float)(product[k] + rest[k]) * curve[k] - copysignf(size, off);
        float tilt = h > 0.0f ? s * (1.0f - s) * SPREAD : 0.0f; /* one condition a line: gcc 12 cannot vectorize && */
        tilt = h < 1.0f ? tilt : 0.0f;
        tilt = curve[k] != 0.0f ? tilt : 0.0f;
        sigmoid[k] = slope * tilt;
    }
}

/* Perform one step of Adam. */
FASTEST static void step_along(const float *restrict slope, float *restrict u, float *restrict mean,
                               float *restrict square, float rate, float scale, Py_ssize_t count)
{
    for (Py_ssize_t k = 0; k < count; k++) {
        const float m = mean[k] + 0.1f * (slope[k] - mean[k]);
        const float v = square[k] + 0.001f * (slope[k] * slope[k] - square[k]);
        mean[k] = m;
        square[k] = v;
        u[k] -= rate * (m / (sqrtf(v * scale) + 1e-8f));
    }
}

static void look(const Task *task, const Row *row, Py_ssize_t count)
{
    look_at(row->u, row->ratio, row->sigmoid, row->value, task->magic, count);
}

static void move(const Row *row, Py_ssize_t count, const float *schedule)
{
    slope_of(row->product, row->rest, row->curve, row->sigmoid, schedule[0], schedule[1], count);
    step_along(row->sigmoid, row->u, row->mean, row->square, schedule[2], schedule[3], count);
}

/* Multiply TALL outputs with one panel, (columns, WIDE). */
EXACT static void multiply(const double *const *values, double *const *products, const float *restrict panel,
                             Py_ssize_t columns)
{
    Part sums[TALL][WIDE / PART];
    memset(sums, 0, sizeof sums);
    for (Py_ssize_t k = 0; k < columns; k++) {
        Part line[WIDE / PART];
        for (int j = 0; j < WIDE / PART; j++)
            line[j] = IN_DOUBLE(((const Short *)(panel + k * WIDE))[j]);
        for (int row = 0; row < TALL; row++)
            for (int j = 0; j < WIDE / PART; j++)
                sums[row][j] += values[row][k] * line[j];
    }
    for (int row = 0; row < TALL; row++)
        memcpy(products[row], sums[row], sizeof sums[row]);
}

/* Multiply some outputs with the whole matrix. */
static void multiply_all(const Task *task, Row *const *rows, Py_ssize_t count)
{
    double spare[WIDE];
    for (Py_ssize_t column = 0; column < task->padded; column += WIDE)
        for (Py_ssize_t first = 0; first < count; first += TALL) {
            const double *values[TALL];
            double *products[TALL];
            for (int i = 0; i < TALL; i++) {
                const int there = first + i < count;
                values[i] = rows[there ? first + i : first]->value;
                products[i] = there ? rows[first + i]->product + column : spare;
            }
            multiply(values, products, task->panels + column * task->columns, task->columns);
        }
}

/* Add all lines, each times its value, to the sums. */
EXACT static void add_lines(const double *restrict values, const float *restrict lines, double *restrict sums,
                              Py_ssize_t count, Py_ssize_t width)
{
    Py_ssize_t k = 0;
    for (; k + 4 <= count; k += 4) {
        const float *a = lines + k * width, *b = a + width, *c = b + width, *d = c + width;
        const double w = values[k], x = values[k + 1], y = values[k + 2], z = values[k + 3];
        for (Py_ssize_t j = 0; j < width; j++)
            sums[j] += (w * a[j] + x * b[j]) + (y * c[j] + z * d[j]);
    }
    for (; k < count; k++)
        for (Py_ssize_t j = 0; j < width; j++)
            sums[j] += values[k] * lines[k * width + j];
}

/* Freeze the weights of an output that are at one of their codes. Writes the indices of the others to `places`,
 * ascending, and returns their number. To be called before the step, while `sigmoid` is that of u. */
static Py_ssize_t between(const Row *row, Py_ssize_t count, int32_t *places)
{
    Py_ssize_t found = 0;
    for (Py_ssize_t k = 0; k < count; k++) {
        const float h = choice(row->sigmoid[k]);
        if (row->curve[k] != 0.0f && h > 0.0f && h < 1.0f) {
            places[found++] = (int32_t)k;
            continue;
        }
        row->curve[k] = 0.0f;
        row->mean[k] = 0.0f;
    }
    return found;
}

static Py_ssize_t up_to(Py_ssize_t count, Py_ssize_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* to[i] = from[places[i]] for all state of an output, padded with zeros. Both may be the same. */
static void pick(const Row *from, const Row *to, const int32_t *places, Py_ssize_t count, Py_ssize_t width)
{
    float *const sources[] = {from->u, from->mean, from->square, from->curve, from->ratio};
    float *const targets[] = {to->u, to->mean, to->square, to->curve, to->ratio};
    for (int each = 0; each < 5; each++)
        for (Py_ssize_t i = 0; i < width; i++)
            targets[each][i] = i < count ? sources[each][places[i]] : 0.0f;
    for (Py_ssize_t i = 0; i < width; i++)
        to->rest[i] = i < count ? from->rest[places[i]] : 0.0;
}

/* Extract the weights of an output that are not frozen; the contribution of all others is added to their `rest`. */
static void begin_few(const Task *task, Row *row, Few *few)
{
    const Py_ssize_t width = up_to(few->left, LANES);
    for (Py_ssize_t i = 0; i < few->left; i++)
        row->value[few->places[i]] = 0.0;
    multiply_all(task, &row, 1);
    for (Py_ssize_t k = 0; k < task->columns; k++)
        row->rest[k] += row->product[k];
    pick(row, &few->row, few->places, few->left, width);
    for (Py_ssize_t i = 0; i < few->left; i++) {
        const float *line = task->panels + few->places[i] * WIDE;
        for (Py_ssize_t j = 0; j < width; j++) {
            const Py_ssize_t at = j < few->left ? few->places[j] : 0;
            few->lines[i * width + j] = j < few->left ? line[at / WIDE * task->columns * WIDE + at % WIDE] : 0.0f;
        }
    }
    few->width = width;
}

/* Keep `left` of the weights, at `places`, in place: everything is read from behind its target. */
static void narrow(Few *few, const int32_t *places, Py_ssize_t left)
{
    const Py_ssize_t before = few->width, width = up_to(left, LANES);
    float *lines = few->lines;
    for (Py_ssize_t i = 0; i < left; i++)
        few->row.value[places[i]] = 0.0;
    add_lines(few->row.value, lines, few->row.rest, few->left, before);
    pick(&few->row, &few->row, places, left, width);
    for (Py_ssize_t i = 0; i < left; i++) {
        const float *line = lines + places[i] * before;
        for (Py_ssize_t j = 0; j < width; j++)
            lines[i * width + j] = j < left ? line[places[j]] : 0.0f;
        few->places[i] = few->places[places[i]];
    }
    few->left = left;
    few->width = width;
}

static void put_back(const Few *few, Row *row)
{
    for (Py_ssize_t i = 0; i < few->left; i++)
        row->u[few->places[i]] = few->row.u[i];
}

/* Run the remaining steps of an output separately. */
static void go_alone(const Task *task, Row *row, Few *few, int32_t *spare, Py_ssize_t step)
{
    begin_few(task, row, few);
    for (; step < task->steps; step++) {
        look(task, &few->row, few->width);
        memset(few->row.product, 0, few->width * sizeof *few->row.product);
        add_lines(few->row.value, few->lines, few->row.product, few->left, few->width);
        const Py_ssize_t left = step % LOOK == LOOK - 1 ? between(&few->row, few->left, spare) : few->left;
        move(&few->row, few->width, task->schedule + 4 * step);
        if (left == 0)
            break;
        if (8 * left <= 7 * few->left) {
            put_back(few, row);
            narrow(few, spare, left);
        }
    }
    put_back(few, row);
}

/* Run all steps of at most BLOCK outputs. */
static void go_together(const Task *task, Row *rows, Py_ssize_t count, Few *few, int32_t *spare)
{
    Row *open[BLOCK];
    for (Py_ssize_t i = 0; i < count; i++)
        open[i] = rows + i;
    for (Py_ssize_t step = 0; step < task->steps && count; step++) {
        for (Py_ssize_t i = 0; i < count; i++)
            look(task, open[i], task->padded);
        multiply_all(task, open, count);
        const int due = step % LOOK == LOOK - 1;
        Py_ssize_t kept = 0;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (due)
                few->left = between(open[i], task->columns, few->places);
            move(open[i], task->padded, task->schedule + 4 * step);
            if (!due || ALONE * few->left * up_to(few->left, LANES) > task->columns * task->padded)
                open[kept++] = open[i];
            else if (few->left)
                go_alone(task, open[i], few, spare, step + 1);
        }
        count = kept;
    }
}

#define AT(type, name) ((type *)(uintptr_t)(name))

/* Bytes of memory per thread: for each output of a block two arrays of doubles and three of floats; for a separate
 * output three and six, the lines, and two lists of indices. */
static Py_ssize_t room(Py_ssize_t columns, Py_ssize_t padded)
{
    const Py_ssize_t doubles = (2 * BLOCK + 3) * padded, floats = (3 * BLOCK + 6) * padded + columns * padded / ALONE;
    return doubles * sizeof(double) + floats * sizeof(float) + 2 * padded * sizeof(int32_t);
}

/* learn(panels, rest, curve, ratio, u, schedule, magic, outputs, columns, padded, first, last, steps)
 *
 * float64: rest (groups, outputs, padded), overwritten; magic: see `Task`. float32: panels (groups, padded / 16,
 * columns, 16); curve, ratio and u (groups, outputs, padded); curve is overwritten, u is changed in place; schedule
 * (steps, 4). Rows first to last of groups x outputs. */
PyObject *learn(PyObject *self, PyObject *args)
{
    unsigned long long panels, rest, curve, ratio, u, schedule;
    double magic;
    Py_ssize_t outputs, columns, padded, first, last, steps;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKKKKdnnnnnn", &panels, &rest, &curve, &ratio, &u, &schedule, &magic, &outputs,
                          &columns, &padded, &first, &last, &steps))
        return NULL;
    double *space = PyMem_Malloc(room(columns, padded));
    if (!space)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    double *own = space + 2 * BLOCK * padded;
    float *floats = (float *)(own + 3 * padded), *mine = floats + 3 * BLOCK * padded;
    Few few = {.row = {mine, mine + padded, mine + 2 * padded, mine + 3 * padded, mine + 4 * padded, mine + 5 * padded,
                       own, own + padded, own + 2 * padded},
               .places = (int32_t *)(mine + 6 * padded),
               .lines = mine + 8 * padded};
    while (first < last) {
        const Py_ssize_t group = first / outputs, end = (group + 1) * outputs < last ? (group + 1) * outputs : last;
        const Py_ssize_t count = end - first < BLOCK ? end - first : BLOCK;
        const Task task = {columns, padded, steps, magic, AT(const float, panels) + group * columns * padded,
                           AT(const float, schedule)};
        Row rows[BLOCK];
        memset(floats, 0, 3 * count * padded * sizeof *floats);
        for (Py_ssize_t i = 0; i < count; i++) {
            const Py_ssize_t at = (first + i) * padded;
            float *each = floats + 3 * i * padded;
            double *pair = space + 2 * i * padded;
            rows[i] = (Row){AT(float, u) + at, each, each + padded, each + 2 * padded, AT(float, curve) + at,
                            AT(float, ratio) + at, pair, pair + padded, AT(double, rest) + at};
        }
        go_together(&task, rows, count, &few, few.places + padded);
        first += count;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(space);
    Py_RETURN_NONE;
}
