//! The backward's first step: the row sums of `dout * out`.

use std::ops::Range;

use candle_core::Result;
use pulp::{Simd, WithSimd};

use super::buffer::{TRANSPOSED_ROWS, Tile};
use super::element::Element;
use super::rows::View;
use super::simd::{Real, arch};
use super::{SharedSlice, for_each_item, zeros};
use crate::params::AttnParams;

/// `delta = rowsum(dout * out)`, `(batch, num_heads, seqlen_q)`.
pub(crate) fn row_sums<E: Element>(
    params: &AttnParams,
    out: View<'_, E>,
    dout: View<'_, E>,
) -> Result<Vec<E::Acc>> {
    let AttnParams {
        batch,
        seqlen_q,
        num_heads,
        head_dim,
        ..
    } = *params;
    let mut delta = zeros("delta", batch * num_heads * seqlen_q)?;
    let shared = SharedSlice::new(&mut delta);
    let blocks = seqlen_q.div_ceil(TRANSPOSED_ROWS);
    for_each_item(
        batch * num_heads * blocks,
        batch * num_heads * seqlen_q * head_dim,
        || RowSumScratch::new(head_dim),
        |scratch, item| {
            let (head_index, block) = (item / blocks, item % blocks);
            let first = block * TRANSPOSED_ROWS;
            let positions = first..(first + TRANSPOSED_ROWS).min(seqlen_q);
            // SAFETY: each row is in exactly one item; delta outlives the call.
            let sums = unsafe { shared.slice_mut(head_index * seqlen_q + first, positions.len()) };
            arch().dispatch(RowSums {
                out,
                dout,
                batch: head_index / num_heads,
                head: head_index % num_heads,
                positions,
                head_dim,
                scratch,
                sums,
            });
        },
    );
    Ok(delta)
}

struct RowSumScratch<T> {
    /// `(head_dim, TRANSPOSED_ROWS)`.
    out_t: Tile<T>,
    dout_t: Tile<T>,
    staging: Tile<T>,
}

impl<T: Real> RowSumScratch<T> {
    fn new(head_dim: usize) -> Self {
        Self {
            out_t: Tile::new(head_dim, TRANSPOSED_ROWS),
            dout_t: Tile::new(head_dim, TRANSPOSED_ROWS),
            staging: Tile::new(TRANSPOSED_ROWS, head_dim),
        }
    }
}

/// The row sums of up to `TRANSPOSED_ROWS` positions of one head, a row a lane.
///
/// Each is summed in the order in which the tile product sums `dout · v`: a row that sees one key has
/// `out = v`, and the difference of the two, which is its gradient, is then exactly 0.
struct RowSums<'a, E: Element> {
    out: View<'a, E>,
    dout: View<'a, E>,
    batch: usize,
    head: usize,
    positions: Range<usize>,
    head_dim: usize,
    scratch: &'a mut RowSumScratch<E::Acc>,
    sums: &'a mut [E::Acc],
}

impl<E: Element> WithSimd for RowSums<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let RowSumScratch {
            out_t,
            dout_t,
            staging,
        } = self.scratch;
        let (count, head_dim) = (self.positions.len(), self.head_dim);
        for (tile, view) in [(&mut *out_t, self.out), (&mut *dout_t, self.dout)] {
            tile.load_transposed(count, head_dim, E::Acc::ONE, staging, |row, line| {
                view.load(self.batch, self.positions.start + row, self.head, line);
            });
        }
        let mut sums = [E::Acc::ZERO; TRANSPOSED_ROWS];
        let (vectors, _) = E::Acc::as_vectors_mut::<S>(&mut sums);
        for d in 0..head_dim {
            let (out, _) = E::Acc::as_vectors::<S>(out_t.row(d, TRANSPOSED_ROWS));
            let (dout, _) = E::Acc::as_vectors::<S>(dout_t.row(d, TRANSPOSED_ROWS));
            for ((sum, &out), &dout) in vectors.iter_mut().zip(out).zip(dout) {
                *sum = E::Acc::mul_add(simd, dout, out, *sum);
            }
        }
        self.sums.copy_from_slice(&sums[..count]);
    }
}
