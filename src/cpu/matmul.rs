//! The tile product, the one place where the attention's multiplications are done.
//!
//! `out += lhs · rhs` on tiles that lie in cache. The rows of `rhs` are read as vectors, the numbers
//! of `lhs` one at a time, so `lhs` may be transposed at no cost, and `rhs` and `out` are row-major.
//! Both products of the forward and all five of the backward have this form without a transposition
//! inside their loops.
//!
//! A micro-kernel holds a block of `MR x NV` vectors of `out` in registers over the whole inner
//! dimension. Six rows by four vectors fill the 32 registers of AVX-512 (24 sums, 4 of `rhs`, one
//! number of `lhs`), six by two the 16 of AVX2 (12 + 2 + 1). On a Zen 5 core at 4.3 GHz, with operands
//! in L2, AVX-512 reaches 271 GFLOP/s (of 2 x 16 x 2 x 4.3 = 275) and AVX2 137 (of 138); 8 x 3 and
//! 12 x 2 reach the same, 2 x 4 only 215: two rows are too few to hide the latency of the multiply-add.

use std::ops::Range;

use bytemuck::Pod;
use pulp::{Simd, WithSimd};

use super::buffer::Tile;
use super::simd::{Real, lanes};

/// Rows of `out` in one micro-kernel.
pub(crate) const MAX_ROWS: usize = 6;
/// Vectors of `out` in one micro-kernel, with 32 registers and with 16.
const MAX_VECTORS: usize = 4;
const MAX_VECTORS_16_REGISTERS: usize = 2;

/// The left operand: element `(i, k)` is `data[i * row_stride + k * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct Lhs<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

/// The right operand, row-major: element `(k, j)` is `data[k * row_stride + j]`.
#[derive(Clone, Copy)]
pub(crate) struct Rhs<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) row_stride: usize,
}

impl<T> Rhs<'_, T> {
    /// What lies below the first `rows` rows.
    pub(crate) fn skip(self, rows: usize) -> Self {
        Self {
            data: &self.data[rows * self.row_stride..],
            ..self
        }
    }
}

/// The sum, row-major: element `(i, j)` is `data[i * row_stride + j]`.
pub(crate) struct Out<'a, T> {
    pub(crate) data: &'a mut [T],
    pub(crate) row_stride: usize,
}

impl<T: Pod> Tile<T> {
    /// What lies below and to the right of (`row`, `col`), as left operand.
    pub(crate) fn lhs(&self, row: usize, col: usize) -> Lhs<'_, T> {
        Lhs {
            data: self.from(row, col),
            row_stride: self.stride(),
            col_stride: 1,
        }
    }

    /// The transpose of the columns from `col` on, as left operand.
    pub(crate) fn lhs_transposed(&self, col: usize) -> Lhs<'_, T> {
        Lhs {
            data: self.from(0, col),
            row_stride: 1,
            col_stride: self.stride(),
        }
    }

    /// What lies below and to the right of (`row`, `col`), as right operand.
    pub(crate) fn rhs(&self, row: usize, col: usize) -> Rhs<'_, T> {
        Rhs {
            data: self.from(row, col),
            row_stride: self.stride(),
        }
    }

    /// What lies below and to the right of (`row`, `col`), as sum.
    pub(crate) fn out(&mut self, row: usize, col: usize) -> Out<'_, T> {
        let row_stride = self.stride();
        Out {
            data: &mut self.data_mut()[row * row_stride + col..],
            row_stride,
        }
    }

    fn from(&self, row: usize, col: usize) -> &[T] {
        &self.data()[row * self.stride() + col..]
    }
}

/// What happens to the numbers that `out` held before.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Begin {
    /// They are overwritten.
    Zero,
    /// They are added to.
    Add,
}

/// `out[0..rows][0..cols] (+)= sum over k in inner of lhs[.., k] * rhs[k, ..]`.
///
/// `cols` is a multiple of the vector's lanes. The sum over `inner` is taken in ascending order, one
/// fused multiply-add at a time, so it has the same bits whatever the blocking.
///
/// # Panics
///
/// If a slice is too short for its strides and the given extents, which would be a bug of the caller.
pub(crate) struct Product<'a, T> {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) inner: Range<usize>,
    pub(crate) lhs: Lhs<'a, T>,
    pub(crate) rhs: Rhs<'a, T>,
    pub(crate) out: Out<'a, T>,
    pub(crate) begin: Begin,
}

impl<T: Real> WithSimd for Product<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self {
            rows,
            cols,
            inner,
            lhs,
            rhs,
            out,
            begin,
        } = self;
        let lanes = lanes::<S, T>();
        assert!(cols.is_multiple_of(lanes));
        if rows == 0 || cols == 0 {
            return;
        }
        assert!((rows - 1) * out.row_stride + cols <= out.data.len());
        if !inner.is_empty() {
            let last = inner.end - 1;
            assert!((rows - 1) * lhs.row_stride + last * lhs.col_stride < lhs.data.len());
            assert!(last * rhs.row_stride + cols <= rhs.data.len());
        }

        let max_vectors = if S::REGISTER_COUNT >= 32 {
            MAX_VECTORS
        } else {
            MAX_VECTORS_16_REGISTERS
        };
        // Blocks of equal height: 64 rows are ten of 6 and 5, not ten of 6 and a slow one of 4.
        let row_blocks = rows.div_ceil(MAX_ROWS);
        let mut col = 0;
        while col < cols {
            let vectors = ((cols - col) / lanes).min(max_vectors);
            let mut row = 0;
            for block in 0..row_blocks {
                let next_row = rows * (block + 1) / row_blocks;
                let micro = Micro::<S, T> {
                    simd,
                    inner: inner.len(),
                    // SAFETY: the asserts above bound every element (i, k) of lhs, (k, j) of rhs and
                    // (i, j) of out with i < rows, j < cols and k in inner; row, col and inner.start
                    // are below those bounds. With an empty inner range neither operand is read,
                    // and wrapping_add makes no claim about the address.
                    lhs: lhs
                        .data
                        .as_ptr()
                        .wrapping_add(row * lhs.row_stride + inner.start * lhs.col_stride),
                    lhs_row: lhs.row_stride,
                    lhs_col: lhs.col_stride,
                    rhs: rhs
                        .data
                        .as_ptr()
                        .wrapping_add(inner.start * rhs.row_stride + col),
                    rhs_row: rhs.row_stride,
                    out: out
                        .data
                        .as_mut_ptr()
                        .wrapping_add(row * out.row_stride + col),
                    out_row: out.row_stride,
                    begin,
                };
                // SAFETY: a block of (next_row - row) x (vectors * lanes) elements of out, starting at
                // (row, col), is inside the extents asserted above.
                unsafe { micro.run_sized(next_row - row, vectors) };
                row = next_row;
            }
            col += vectors * lanes;
        }
    }
}

/// One block of `out`: pointers to its first element and to the operands' first row and column.
#[derive(Clone, Copy)]
struct Micro<S, T> {
    simd: S,
    inner: usize,
    lhs: *const T,
    lhs_row: usize,
    lhs_col: usize,
    rhs: *const T,
    rhs_row: usize,
    out: *mut T,
    out_row: usize,
    begin: Begin,
}

impl<S: Simd, T: Real> Micro<S, T> {
    /// Runs the block with `rows` and `vectors` turned into constants.
    ///
    /// # Safety
    ///
    /// As for [`Micro::run`].
    #[inline(always)]
    unsafe fn run_sized(self, rows: usize, vectors: usize) {
        macro_rules! dispatch {
            ($($rows:literal)*) => {
                match (rows, vectors) {
                    $(
                        ($rows, 1) => self.run::<$rows, 1>(),
                        ($rows, 2) => self.run::<$rows, 2>(),
                        ($rows, 3) if S::REGISTER_COUNT >= 32 => self.run::<$rows, 3>(),
                        ($rows, 4) if S::REGISTER_COUNT >= 32 => self.run::<$rows, 4>(),
                    )*
                    _ => unreachable!("block of {rows} x {vectors} vectors"),
                }
            };
        }
        // SAFETY: `run` has the contract of this function, with the same extents.
        unsafe { dispatch!(1 2 3 4 5 6) }
    }

    /// The micro-kernel.
    ///
    /// # Safety
    ///
    /// For `i < MR`, `j < NV * lanes` and `k < inner`, the elements `lhs + i * lhs_row + k * lhs_col`,
    /// `rhs + k * rhs_row + j` must be readable and `out + i * out_row + j` readable and writable.
    #[inline(always)]
    unsafe fn run<const MR: usize, const NV: usize>(self) {
        let lanes = lanes::<S, T>();
        let mut sums = [[T::splat(self.simd, T::ZERO); NV]; MR];
        // SAFETY: every address below is one of those that the caller vouches for. Vectors are read and
        // written unaligned; `Real::Vector` is a plain vector of `lanes` numbers.
        unsafe {
            if self.begin == Begin::Add {
                for (i, sums) in sums.iter_mut().enumerate() {
                    for (j, sum) in sums.iter_mut().enumerate() {
                        let address = self.out.add(i * self.out_row + j * lanes);
                        *sum = address.cast::<T::Vector<S>>().read_unaligned();
                    }
                }
            }
            let mut lhs = self.lhs;
            let mut rhs = self.rhs;
            for _ in 0..self.inner {
                let mut row = [T::splat(self.simd, T::ZERO); NV];
                for (j, vector) in row.iter_mut().enumerate() {
                    *vector = rhs.add(j * lanes).cast::<T::Vector<S>>().read_unaligned();
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let number = T::splat(self.simd, *lhs.add(i * self.lhs_row));
                    for (sum, &vector) in sums.iter_mut().zip(&row) {
                        *sum = T::mul_add(self.simd, number, vector, *sum);
                    }
                }
                lhs = lhs.wrapping_add(self.lhs_col);
                rhs = rhs.wrapping_add(self.rhs_row);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (j, &sum) in sums.iter().enumerate() {
                    let address = self.out.add(i * self.out_row + j * lanes);
                    address.cast::<T::Vector<S>>().write_unaligned(sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pulp::{Scalar, Simd};

    use super::*;
    use crate::cpu::simd::arch;

    /// Whole numbers, so that every sum is exact in any order.
    fn whole_numbers(len: usize, seed: usize) -> Vec<f32> {
        (0..len)
            .map(|i| ((i * 31 + seed) % 17) as f32 - 8.)
            .collect()
    }

    /// Compares a product of every number of rows with plain loops, and that nothing else is written.
    fn check(cols: usize, inner: Range<usize>, transposed: bool, begin: Begin, scalar: bool) {
        const UNTOUCHED: f32 = 777.;
        for rows in 1..=20 {
            let (lhs_stride, rhs_stride, out_stride) = (40, cols + 16, cols + 32);
            let lhs_data = whole_numbers(40 * 40, 1);
            let rhs_data = whole_numbers(40 * rhs_stride, 2);
            let start = whole_numbers(rows * out_stride, 3);
            let mut out: Vec<f32> = start
                .iter()
                .enumerate()
                .map(|(i, &x)| if i % out_stride < cols { x } else { UNTOUCHED })
                .collect();
            let (row_stride, col_stride) = if transposed {
                (1, lhs_stride)
            } else {
                (lhs_stride, 1)
            };
            let product = Product {
                rows,
                cols,
                inner: inner.clone(),
                lhs: Lhs {
                    data: &lhs_data,
                    row_stride,
                    col_stride,
                },
                rhs: Rhs {
                    data: &rhs_data,
                    row_stride: rhs_stride,
                },
                out: Out {
                    data: &mut out,
                    row_stride: out_stride,
                },
                begin,
            };
            if scalar {
                Simd::vectorize(Scalar::new(), product);
            } else {
                arch().dispatch(product);
            }
            for (i, &got) in out.iter().enumerate() {
                let (row, col) = (i / out_stride, i % out_stride);
                let expected = if col < cols {
                    let before = if begin == Begin::Add { start[i] } else { 0. };
                    before
                        + inner
                            .clone()
                            .map(|k| {
                                lhs_data[row * row_stride + k * col_stride]
                                    * rhs_data[k * rhs_stride + col]
                            })
                            .sum::<f32>()
                } else {
                    UNTOUCHED
                };
                assert_eq!(got, expected, "row {row}, column {col} of {rows} x {cols}");
            }
        }
    }

    #[test]
    fn products_of_every_block_shape_equal_plain_loops() {
        for cols in [16, 32, 48, 64, 80, 112, 128] {
            for (transposed, begin) in [
                (false, Begin::Zero),
                (true, Begin::Zero),
                (false, Begin::Add),
                (true, Begin::Add),
            ] {
                for scalar in [false, true] {
                    check(cols, 3..29, transposed, begin, scalar);
                }
            }
        }
    }

    #[test]
    fn an_empty_inner_dimension_leaves_zeros_or_what_was_there() {
        check(32, 5..5, false, Begin::Zero, false);
        check(32, 5..5, false, Begin::Add, false);
    }
}
