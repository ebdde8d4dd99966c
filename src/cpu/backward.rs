//! The backward pass: dq, dk and dv (FlashAttention-2, Algorithm 2).
//!
//! A work item is a tile of keys of one key/value head and all query rows that see it, of all heads of
//! the group, so dk and dv are sums of one thread and need no atomics:
//!
//! ```text
//! k_t, v_t = transposes of k and v                      once, head_dim x keys
//! for each tile of query rows that see some key, in ascending order:
//!     scores  = scale * q · k_t                         rows x keys, as in the forward
//!     dprobs  = dout · v_t
//!     probs   = 2^(scores - max - log2(sum))
//!     dscores = probs * (dprobs - delta)                delta = rowsum(dout * out)
//!     dv     += probsᵀ · dout
//!     dk     += dscoresᵀ · q
//!     dq     += dscores · k                             in the order of the key tiles
//! ```
//!
//! dq is the one sum across items. It is kept in order without a buffer for each item: every query tile
//! counts the key tiles that it has taken in, and an item waits until its turn has come. Items are
//! claimed in ascending order of their key tile, so the item that is waited for is running or done,
//! and with several heads or batch items in between it is almost always done. So dq, too, has the same
//! bits whatever the number of threads.
//!
//! The score of a row and key is summed in the forward's order and has the same bits; the maximum that
//! the forward found is taken off it before anything is rounded to the size of the sum. With a single
//! lse in f32, scores of 10^6 would leave nothing of the difference.
//!
//! [`backward_tile`](super::backward_tile) holds the steps on one pair of tiles.

use candle_core::Result;

use super::backward_tile::{LoadKeys, Rows, Scratch, Step};
use super::delta::row_sums;
use super::element::Element;
use super::rows::{RowTiling, Scaling, View};
use super::simd::arch;
use super::turns::Turns;
use super::{SharedSlice, for_each_item, multiply_adds, zeros};
use crate::params::AttnParams;

/// (rows, keys) of a tile: the ten tiles of the scratch stay within 512 KiB up to head_dim 128 in f32.
const fn tile_sizes<T>(head_dim: usize) -> (usize, usize) {
    match head_dim * size_of::<T>() {
        0..=256 => (96, 128),
        257..=512 => (96, 64),
        _ => (48, 48),
    }
}

/// Computes `[dq, dk, dv]`, contiguous. `stats` is what the forward left.
pub(crate) fn backward<E: Element>(
    params: &AttnParams,
    q: View<'_, E>,
    k: View<'_, E>,
    v: View<'_, E>,
    out: View<'_, E>,
    dout: View<'_, E>,
    stats: &[E::Acc],
) -> Result<[Vec<E>; 3]> {
    let AttnParams {
        batch,
        seqlen_q,
        seqlen_k,
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = *params;
    let mut dq: Vec<E::Acc> = zeros("dq", batch * seqlen_q * num_heads * head_dim)?;
    let mut dk: Vec<E> = zeros("dk", batch * seqlen_k * num_kv_heads * head_dim)?;
    let mut dv: Vec<E> = zeros("dv", dk.len())?;
    if dq.is_empty() || dk.is_empty() {
        return Ok([E::narrow_all(dq)?, dk, dv]);
    }

    let delta = row_sums(params, out, dout)?;
    let (tile_m, tile_n) = tile_sizes::<E::Acc>(head_dim);
    let tiling = RowTiling::new(params, tile_m);
    let scaling = Scaling::<E::Acc>::new(params);
    let kv_heads = batch * num_kv_heads;
    let query_tiles = tiling.head_blocks * tiling.m_tiles;
    let turns = Turns::new(kv_heads * query_tiles, |index| {
        let m_tile = index % tiling.m_tiles;
        let positions = tiling.tile(0, 0, 0, m_tile).positions;
        params.mask.keys_of_rows(positions).start / tile_n
    });
    let rows = Rows {
        delta: &delta,
        stats,
    };
    let shared_dq = SharedSlice::new(&mut dq);
    let shared_dk = SharedSlice::new(&mut dk);
    let shared_dv = SharedSlice::new(&mut dv);

    for_each_item(
        seqlen_k.div_ceil(tile_n) * kv_heads,
        multiply_adds(batch * num_heads * seqlen_q, seqlen_k, head_dim, 5),
        || Scratch::<E::Acc>::new(head_dim, tiling.tile_m(), tile_n),
        |scratch, item| {
            let (n_tile, batch_and_head) = (item / kv_heads, item % kv_heads);
            let (batch, kv_head) = tiling.batch_and_kv_head(batch_and_head);
            let keys = n_tile * tile_n..((n_tile + 1) * tile_n).min(seqlen_k);
            // If this thread unwinds, those that wait for its turns must not wait for ever.
            let _guard = turns.release_on_unwind();
            arch().dispatch(LoadKeys {
                params,
                k,
                v,
                batch,
                kv_head,
                keys: keys.clone(),
                scratch,
            });
            for m_tile in tiling.m_tiles_of(params.mask.rows_of_keys(keys.clone())) {
                for head_block in 0..tiling.head_blocks {
                    let tile = tiling.tile(batch, kv_head, head_block, m_tile);
                    arch().dispatch(Step {
                        params,
                        q,
                        dout,
                        rows,
                        tile: &tile,
                        keys: keys.clone(),
                        scratch,
                    });
                    let turn = (batch_and_head * tiling.head_blocks + head_block) * tiling.m_tiles
                        + m_tile;
                    if !turns.wait(turn, n_tile) {
                        return;
                    }
                    for row in 0..tile.rows() {
                        let (position, head) = tile.row(row);
                        let start = ((batch * seqlen_q + position) * num_heads + head) * head_dim;
                        // SAFETY: these rows belong to this query tile alone, and its turn belongs to
                        // this item until `finish`; dq outlives the call.
                        let dq_row = unsafe { shared_dq.slice_mut(start, head_dim) };
                        for (dq, &x) in dq_row.iter_mut().zip(scratch.dq.row(row, head_dim)) {
                            *dq += scaling.dq * x;
                        }
                    }
                    turns.finish(turn, n_tile);
                }
            }
            for key in keys.clone() {
                let start = ((batch * seqlen_k + key) * num_kv_heads + kv_head) * head_dim;
                let line = key - keys.start;
                for x in scratch.dk.row_mut(line, head_dim) {
                    *x = *x * scaling.dk;
                }
                // SAFETY: each (batch, key, kv_head) is in exactly one item; dk and dv outlive the call.
                let (dk, dv) = unsafe {
                    (
                        shared_dk.slice_mut(start, head_dim),
                        shared_dv.slice_mut(start, head_dim),
                    )
                };
                E::narrow(scratch.dk.row(line, head_dim), dk);
                E::narrow(scratch.dv.row(line, head_dim), dv);
            }
        },
    );
    Ok([E::narrow_all(dq)?, dk, dv])
}
