//! Attention and its gradients in f64 on the host, straight from the definition.
//!
//! One row at a time, over the keys that the row sees; a hidden key doesn't exist. Nothing here comes
//! from the crate, and nothing is clever.

use super::problem::Problem;

/// `out (batch, seqlen_q, num_heads, head_dim)` and `lse (batch, num_heads, seqlen_q)`.
pub struct Forward {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
}

/// Of the shapes of q, k and v.
pub struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// The softmax of one row: for each key that it sees the probability, and the derivative of its score
/// by `q·k`.
struct Row {
    keys: Vec<usize>,
    probs: Vec<f64>,
    slopes: Vec<f64>,
    lse: f64,
}

pub fn forward(problem: &Problem, q: &[f64], k: &[f64], v: &[f64]) -> Forward {
    let p = problem;
    let mut out = vec![0.; q.len()];
    let mut lse = vec![f64::NEG_INFINITY; p.batch * p.num_heads * p.seqlen_q];
    for_each_row(p, |batch, head, i| {
        let kv_head = head / (p.num_heads / p.num_kv_heads);
        let row = softmax(p, q, k, batch, head, i);
        let start = q_index(p, batch, i, head);
        for (&j, &prob) in row.keys.iter().zip(&row.probs) {
            let v_row = &v[kv_index(p, batch, j, kv_head)..][..p.head_dim];
            for d in 0..p.head_dim {
                out[start + d] += prob * v_row[d];
            }
        }
        lse[(batch * p.num_heads + head) * p.seqlen_q + i] = row.lse;
    });
    Forward { out, lse }
}

pub fn backward(problem: &Problem, q: &[f64], k: &[f64], v: &[f64], dout: &[f64]) -> Gradients {
    let p = problem;
    let mut grads = Gradients {
        dq: vec![0.; q.len()],
        dk: vec![0.; k.len()],
        dv: vec![0.; v.len()],
    };
    for_each_row(p, |batch, head, i| {
        let kv_head = head / (p.num_heads / p.num_kv_heads);
        let row = softmax(p, q, k, batch, head, i);
        let start = q_index(p, batch, i, head);
        let (q_row, dout_row) = (&q[start..][..p.head_dim], &dout[start..][..p.head_dim]);
        let starts: Vec<usize> = row
            .keys
            .iter()
            .map(|&j| kv_index(p, batch, j, kv_head))
            .collect();
        // dprobs = dout · v, delta = probs · dprobs, dscores = probs * (dprobs - delta)
        let dprobs: Vec<f64> = starts
            .iter()
            .map(|&key| dot(dout_row, &v[key..][..p.head_dim]))
            .collect();
        let delta = dot(&row.probs, &dprobs);
        for (n, &key) in starts.iter().enumerate() {
            let dscore = row.probs[n] * (dprobs[n] - delta) * row.slopes[n];
            for d in 0..p.head_dim {
                grads.dq[start + d] += dscore * k[key + d];
                grads.dk[key + d] += dscore * q_row[d];
                grads.dv[key + d] += row.probs[n] * dout_row[d];
            }
        }
    });
    grads
}

fn softmax(p: &Problem, q: &[f64], k: &[f64], batch: usize, head: usize, i: usize) -> Row {
    let kv_head = head / (p.num_heads / p.num_kv_heads);
    let q_row = &q[q_index(p, batch, i, head)..][..p.head_dim];
    let scale = match p.softmax_scale {
        Some(scale) => f64::from(scale),
        None => 1. / (p.head_dim as f64).sqrt(),
    };
    let keys = p.visible(i);
    let mut scores = Vec::with_capacity(keys.len());
    let mut slopes = Vec::with_capacity(keys.len());
    for &j in &keys {
        let k_row = &k[kv_index(p, batch, j, kv_head)..][..p.head_dim];
        let mut score = dot(q_row, k_row) * scale;
        let mut slope = scale;
        if let Some(softcap) = p.softcap.map(f64::from) {
            let tanh = (score / softcap).tanh();
            score = softcap * tanh;
            slope *= 1. - tanh * tanh;
        }
        if let Some(alibi) = p.slope(batch, head) {
            score -= f64::from(alibi) * p.offset(i, j).abs() as f64;
        }
        scores.push(score);
        slopes.push(slope);
    }
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    Row {
        keys,
        probs: exponentials.iter().map(|x| x / sum).collect(),
        slopes,
        lse: max + sum.ln(),
    }
}

fn for_each_row(p: &Problem, mut f: impl FnMut(usize, usize, usize)) {
    for batch in 0..p.batch {
        for head in 0..p.num_heads {
            for i in 0..p.seqlen_q {
                f(batch, head, i);
            }
        }
    }
}

fn q_index(p: &Problem, batch: usize, i: usize, head: usize) -> usize {
    ((batch * p.seqlen_q + i) * p.num_heads + head) * p.head_dim
}

fn kv_index(p: &Problem, batch: usize, j: usize, kv_head: usize) -> usize {
    ((batch * p.seqlen_k + j) * p.num_kv_heads + kv_head) * p.head_dim
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
