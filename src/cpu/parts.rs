//! The end of a row: the division by its sum, and before that, where its keys were split, the sum of
//! its parts.

use candle_core::Result;

use super::element::Element;
use super::simd::Real;
use super::{SharedSlice, zeros};
use crate::params::AttnParams;

/// Divides by the row's sum, rounds, and stores out and the statistics of one row.
///
/// A row that sees no key keeps out = 0 and lse = -inf. One that sees keys and whose scores are all
/// -inf has sum 0 too, but by definition its output is NaN.
pub(crate) fn finish_row<E: Element>(
    sees_keys: bool,
    acc: &mut [E::Acc],
    max: E::Acc,
    sum: E::Acc,
    out: &mut [E],
    out_max: &mut E::Acc,
    out_log_sum: &mut E::Acc,
) {
    if !sees_keys {
        return;
    }
    let sum = if sum == E::Acc::ZERO {
        E::Acc::from_f64(f64::NAN)
    } else {
        sum
    };
    for x in acc.iter_mut() {
        *x = *x / sum;
    }
    E::narrow(acc, out);
    *out_max = max;
    *out_log_sum = E::Acc::from_f64(sum.to_f64().log2());
}

/// What each part of the keys left of each row: `(parts, batch, seqlen_q, num_heads, ...)`.
pub(crate) struct Partial<T> {
    out: Vec<T>,
    max: Vec<T>,
    sum: Vec<T>,
}

impl<T: Real> Partial<T> {
    pub(crate) fn new(rows: usize, head_dim: usize) -> Result<Self> {
        let mut max: Vec<T> = zeros("the parts' maxima", rows)?;
        max.fill(T::NEG_INFINITY);
        Ok(Self {
            out: zeros("the parts of out", rows * head_dim)?,
            max,
            sum: zeros("the parts' sums", rows)?,
        })
    }

    pub(crate) fn share(&mut self) -> SharedPartial<T> {
        SharedPartial {
            out: SharedSlice::new(&mut self.out),
            max: SharedSlice::new(&mut self.max),
            sum: SharedSlice::new(&mut self.sum),
        }
    }
}

/// A [`Partial`] whose rows are written by several threads.
#[derive(Clone, Copy)]
pub(crate) struct SharedPartial<T> {
    out: SharedSlice<T>,
    max: SharedSlice<T>,
    sum: SharedSlice<T>,
}

impl<T: Real> SharedPartial<T> {
    /// # Safety
    ///
    /// The `Partial` must be alive, and no other thread may store this row.
    pub(crate) unsafe fn store(self, row: usize, out: &[T], max: T, sum: T) {
        // SAFETY: passed on from the caller.
        unsafe {
            self.out
                .slice_mut(row * out.len(), out.len())
                .copy_from_slice(out);
            self.max.slice_mut(row, 1)[0] = max;
            self.sum.slice_mut(row, 1)[0] = sum;
        }
    }
}

/// Adds up the parts of every row, in order.
pub(crate) fn combine<E: Element>(
    params: &AttnParams,
    parts: usize,
    partial: &Partial<E::Acc>,
    out: &mut [E],
    stats: &mut [E::Acc],
) {
    let AttnParams {
        seqlen_q,
        num_heads,
        head_dim,
        ..
    } = *params;
    let (maxima, log_sums) = stats.split_at_mut(stats.len() / 2);
    let rows = maxima.len();
    let mut acc = vec![E::Acc::ZERO; head_dim];
    for row in 0..rows {
        let max = (0..parts)
            .map(|part| partial.max[part * rows + row])
            .fold(E::Acc::NEG_INFINITY, |a, b| if b > a { b } else { a });
        acc.fill(E::Acc::ZERO);
        let mut sum = E::Acc::ZERO;
        // Where no part has a score above -inf there is nothing to add, and -inf - -inf is NaN.
        let parts = if max == E::Acc::NEG_INFINITY {
            0
        } else {
            parts
        };
        for part in 0..parts {
            let row = part * rows + row;
            let weight = E::Acc::from_f64((partial.max[row].to_f64() - max.to_f64()).exp2());
            sum += partial.sum[row] * weight;
            for (acc, &x) in acc.iter_mut().zip(&partial.out[row * head_dim..]) {
                *acc += x * weight;
            }
        }
        let (batch, position, head) = (
            row / (seqlen_q * num_heads),
            row / num_heads % seqlen_q,
            row % num_heads,
        );
        let stats_row = (batch * num_heads + head) * seqlen_q + position;
        finish_row::<E>(
            !params.mask.keys_of_row(position).is_empty(),
            &mut acc,
            max,
            sum,
            &mut out[row * head_dim..][..head_dim],
            &mut maxima[stats_row],
            &mut log_sums[stats_row],
        );
    }
}
