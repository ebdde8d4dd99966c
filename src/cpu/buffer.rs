//! Scratch tiles: cache-line aligned, reused by a thread for all its work.

use bytemuck::{Pod, Zeroable};

use super::simd::Real;

pub(crate) const LINE_BYTES: usize = 64;

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

/// A row-major tile whose rows begin on cache lines.
///
/// A row is an odd number of lines long, so that a column of vectors spreads over all sets of the
/// cache; with rows of 512 bytes (head_dim 128) it would fall on an eighth of them.
pub(crate) struct Tile<T> {
    lines: Vec<Line>,
    stride: usize,
    marker: std::marker::PhantomData<T>,
}

impl<T: Pod> Tile<T> {
    /// A tile of zeros with room for `rows` rows of `cols` numbers.
    pub(crate) fn new(rows: usize, cols: usize) -> Self {
        let lines_per_row = (padded::<T>(cols) * size_of::<T>() / LINE_BYTES) | 1;
        Self {
            lines: bytemuck::zeroed_vec(rows * lines_per_row),
            stride: lines_per_row * LINE_BYTES / size_of::<T>(),
            marker: std::marker::PhantomData,
        }
    }

    /// Numbers from one row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    pub(crate) fn data(&self) -> &[T] {
        bytemuck::cast_slice(&self.lines)
    }

    pub(crate) fn data_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }

    /// The first `cols` numbers of a row.
    pub(crate) fn row(&self, row: usize, cols: usize) -> &[T] {
        &self.data()[row * self.stride..][..cols]
    }

    /// The first `cols` numbers of a row.
    pub(crate) fn row_mut(&mut self, row: usize, cols: usize) -> &mut [T] {
        let stride = self.stride;
        &mut self.data_mut()[row * stride..][..cols]
    }
}

/// Rows that [`Tile::load_transposed`] takes together: in f32 they fill a cache line of the result.
pub(crate) const TRANSPOSED_ROWS: usize = 16;

impl<T: Real> Tile<T> {
    /// Fills the tile with the transpose of `rows` rows of `cols` numbers, times `factor`.
    ///
    /// `load` writes a row; `staging` has room for [`TRANSPOSED_ROWS`] of them.
    #[inline(always)]
    pub(crate) fn load_transposed(
        &mut self,
        rows: usize,
        cols: usize,
        factor: T,
        staging: &mut Self,
        mut load: impl FnMut(usize, &mut [T]),
    ) {
        for first in (0..rows).step_by(TRANSPOSED_ROWS) {
            let count = TRANSPOSED_ROWS.min(rows - first);
            for i in 0..count {
                load(first + i, staging.row_mut(i, cols));
            }
            let (stride, data) = (staging.stride(), staging.data());
            for col in 0..cols {
                let line = &mut self.row_mut(col, first + count)[first..];
                for (i, x) in line.iter_mut().enumerate() {
                    *x = data[i * stride + col] * factor;
                }
            }
        }
    }
}

/// `count` rounded up to whole cache lines, which are whole vectors on every machine.
pub(crate) const fn padded<T>(count: usize) -> usize {
    count.next_multiple_of(LINE_BYTES / size_of::<T>())
}
