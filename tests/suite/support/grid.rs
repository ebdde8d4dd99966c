//! Cases that cover every pair of values of their dimensions, without the full product.
//!
//! What happens to a score chooses the kernels on Hopper: those for Hopper alone get a third of a grid of [`Scores::Any`],
//! in which not every pair meets, and all of one of [`Scores::Plain`].

use anyhow::{Result, bail};
use candle_core::{DType, Device};
use candle_flash_gqa::is_supported;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::device::{for_each_device, on_the_gpu};
use super::problem::Problem;
use super::tensors::Inputs;

/// `(seqlen_q, seqlen_k)`: at, one below and one above the edges of the tiles (48, 64, 96, 128 and 192
/// rows or keys); queries longer and shorter than keys; few rows on keys that are split (from 1024).
const SEQLENS: [[usize; 2]; 18] = [
    [1, 1],
    [1, 65],
    [1, 1030],
    [2, 5],
    [5, 2],
    [8, 97],
    [20, 1100],
    [31, 64],
    [48, 48],
    [49, 95],
    [63, 96],
    [65, 47],
    [97, 49],
    [96, 193],
    [127, 128],
    [129, 127],
    [193, 257],
    [257, 191],
];

/// Groups of 1, 2, 3, 4, 7, 8, 32 heads, and of more heads than a tile has rows.
const HEADS: [[usize; 2]; 9] = [
    [1, 1],
    [3, 3],
    [4, 2],
    [6, 2],
    [4, 1],
    [7, 1],
    [16, 2],
    [32, 1],
    [200, 1],
];

const HEAD_DIMS: [usize; 10] = [1, 8, 40, 63, 64, 80, 96, 128, 192, 256];

/// What a row sees.
const MASKS: [fn(Problem) -> Problem; 9] = [
    |p| p,
    |p| p.causal(),
    |p| p.window(Some(3), Some(5)),
    |p| p.causal().window(Some(20), None),
    |p| p.window(Some(40), None),
    |p| p.window(None, Some(2)),
    |p| p.window(Some(0), Some(0)),
    |p| p.window(Some(1000), Some(50)),
    |p| p.causal().window(Some(0), Some(9)),
];

/// What happens to a score: first what is [`Scores::Plain`].
const SCORES: [fn(Problem) -> Problem; 6] = [
    |p| p,
    |p| p.scale(0.3),
    |p| p.softcap(1.5),
    |p| p.alibi(),
    |p| p.softcap(20.).alibi_of_batch(),
    |p| p.alibi_of_batch().scale(-0.1),
];

const BATCHES: [usize; 2] = [1, 2];

/// Whether dq is added in order.
const ORDERS: [fn(Problem) -> Problem; 2] = [|p| p, |p| p.deterministic()];

/// Multiply-adds in `q · k` of one case at most: what keeps the grid quick. The largest lengths thus
/// meet many heads only at a small head_dim, and the other way round.
const MAX_WORK: usize = 14_000_000;

/// The scores of a grid.
#[derive(Debug, Clone, Copy)]
pub enum Scores {
    Any,
    /// Times a positive factor and no more: what every kernel takes (`is_plain` of src/cuda/dispatch.rs).
    Plain,
}

impl Scores {
    /// How many of [`SCORES`], from the first on.
    fn count(self) -> usize {
        match self {
            Self::Any => SCORES.len(),
            Self::Plain => 2,
        }
    }
}

/// One value of each dimension.
type Case = [usize; 7];

/// How many values each dimension has.
fn dimensions(scores: Scores) -> Case {
    [
        SEQLENS.len(),
        HEADS.len(),
        HEAD_DIMS.len(),
        MASKS.len(),
        scores.count(),
        BATCHES.len(),
        ORDERS.len(),
    ]
}

/// Problems in which every two values of two dimensions meet; other problems for another seed.
pub fn problems(seed: u64, scores: Scores) -> Vec<Problem> {
    cover(seed, dimensions(scores))
        .into_iter()
        .map(problem)
        .collect()
}

/// A handful with some of everything, for what can't run the whole grid.
pub fn small_problems() -> Vec<Problem> {
    vec![
        Problem::new(1, [1, 1], [1, 1], 1),
        Problem::new(2, [33, 70], [4, 2], 40).causal(),
        Problem::new(1, [100, 50], [3, 1], 63).causal().softcap(2.),
        Problem::new(1, [97, 129], [2, 2], 64).window(Some(20), Some(5)),
        Problem::new(1, [65, 65], [2, 1], 128).alibi(),
        Problem::new(1, [3, 1100], [2, 1], 24).causal().alibi(),
        Problem::new(1, [1, 200], [7, 1], 80).softcap(2.),
        Problem::new(1, [20, 30], [2, 1], 256).causal(),
        Problem::new(1, [130, 190], [4, 1], 64)
            .causal()
            .deterministic(),
        Problem::new(2, [129, 65], [2, 2], 64).alibi_of_batch(),
        Problem::new(1, [150, 110], [2, 1], 72).causal(),
        Problem::new(1, [70, 199], [2, 2], 128)
            .window(Some(0), Some(40))
            .deterministic(),
        Problem::new(1, [129, 129], [3, 1], 128)
            .causal()
            .softcap(5.)
            .alibi(),
        Problem::new(1, [60, 140], [2, 2], 192).deterministic(),
        Problem::new(1, [90, 131], [4, 2], 256)
            .causal()
            .window(Some(30), None),
        Problem::new(1, [129, 33], [2, 1], 256)
            .softcap(3.)
            .deterministic(),
    ]
}

/// Runs `test` on the inputs of every problem of a grid that has a kernel, on each device; of [`Scores::Plain`] on the GPU
/// alone, where they have kernels of their own. A seed for each dtype, since tile sizes depend on it. Fails with a list of
/// those that failed.
pub fn for_each_problem(
    dtype: DType,
    seed: u64,
    scores: Scores,
    test: impl Fn(&Problem, &Inputs) -> Result<()>,
) -> Result<()> {
    let on = |device: &Device| {
        let problems = problems(seed, scores);
        let mut failures = Vec::new();
        for (number, problem) in problems.iter().enumerate() {
            if !is_supported(device, dtype, problem.head_dim) {
                continue;
            }
            let inputs = Inputs::normal(problem, dtype, device, number as u64)?;
            if let Err(error) = test(problem, &inputs) {
                failures.push(format!("{error:#}"));
            }
        }
        if !failures.is_empty() {
            failures.sort_by_key(String::len);
            let shown = failures.len().min(5);
            bail!(
                "{} of {} problems fail, {shown} of them:\n{}",
                failures.len(),
                problems.len(),
                failures[..shown].join("\n")
            );
        }
        Ok(())
    };
    match scores {
        Scores::Any => for_each_device(on),
        Scores::Plain => on_the_gpu(on),
    }
}

fn problem([seqlens, heads, head_dim, mask, scores, batch, order]: Case) -> Problem {
    let problem = Problem::new(
        BATCHES[batch],
        SEQLENS[seqlens],
        HEADS[heads],
        HEAD_DIMS[head_dim],
    );
    ORDERS[order](SCORES[scores](MASKS[mask](problem)))
}

fn is_quick(case: Case) -> bool {
    let p = problem(case);
    p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * p.head_dim <= MAX_WORK
}

/// Greedy: of a few random cases around a pair that has not met yet, the one with the most such pairs.
fn cover(seed: u64, dimensions: Case) -> Vec<Case> {
    const CANDIDATES: usize = 20;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut missing = all_pairs(dimensions);
    missing.shuffle(&mut rng);
    let mut cases = Vec::new();
    while let Some(&[(a, value_a), (b, value_b)]) = missing.last() {
        let mut candidates = Vec::new();
        while candidates.len() < CANDIDATES {
            let mut case = dimensions.map(|count| rng.random_range(0..count));
            (case[a], case[b]) = (value_a, value_b);
            if is_quick(case) {
                candidates.push(case);
            }
        }
        let meets = |case: &Case, &[(a, x), (b, y)]: &Pair| case[a] == x && case[b] == y;
        let gain = |case: &Case| missing.iter().filter(|pair| meets(case, pair)).count();
        if let Some(case) = candidates.into_iter().max_by_key(gain) {
            missing.retain(|pair| !meets(&case, pair));
            cases.push(case);
        }
    }
    cases
}

/// Two dimensions, each with a value.
type Pair = [(usize, usize); 2];

fn all_pairs(dimensions: Case) -> Vec<Pair> {
    let dimensions: Vec<(usize, usize)> = dimensions.into_iter().enumerate().collect();
    let mut pairs = Vec::new();
    for &(a, values_of_a) in &dimensions {
        for &(b, values_of_b) in &dimensions[a + 1..] {
            for x in 0..values_of_a {
                pairs.extend((0..values_of_b).map(|y| [(a, x), (b, y)]));
            }
        }
    }
    pairs
}
