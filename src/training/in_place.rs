//! Tensors that are written to, several at a time.

use std::cell::Cell;

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};

use super::check::Named;

/// Storages that are locked for writing, all on one device.
#[derive(Default)]
pub(super) struct Locked<'a> {
    pub(super) cpu: Vec<(&'a mut CpuStorage, &'a Layout)>,
    #[cfg(feature = "cuda")]
    pub(super) cuda: Vec<(&'a mut CudaStorage, &'a Layout)>,
}

/// Refuses tensors that cannot be written to side by side while `read` is read: they must be contiguous, and all of
/// different storages.
pub(super) fn check(op: &str, written: &[Named<'_>], read: Named<'_>) -> Result<()> {
    for (i, &(name, tensor)) in written.iter().enumerate() {
        if !tensor.is_contiguous() {
            bail!("{op}: {name} must be contiguous, got {:?}", tensor.layout());
        }
        let others = written[i + 1..].iter().chain([&read]);
        if let Some((other, _)) = others.into_iter().find(|(_, x)| share(tensor, x)) {
            bail!("{op}: {name} and {other} must not share their storage");
        }
    }
    Ok(())
}

fn share(a: &Tensor, b: &Tensor) -> bool {
    let [(a, _), (b, _)] = [a, b].map(Tensor::storage_and_layout);
    std::ptr::eq(&*a, &*b)
}

/// Calls `work` with the storages of `tensors`, in their order. They have passed [`check`].
///
/// candle hands out one storage for writing, inside an in-place op: so each tensor's op locks the next one.
pub(super) fn lock(
    op: &'static str,
    tensors: &[&Tensor],
    work: impl FnOnce(Locked<'_>) -> Result<()>,
) -> Result<()> {
    lock_rest(op, tensors, Locked::default(), work)
}

fn lock_rest<Work: FnOnce(Locked<'_>) -> Result<()>>(
    op: &'static str,
    tensors: &[&Tensor],
    locked: Locked<'_>,
    work: Work,
) -> Result<()> {
    match tensors {
        [] => work(locked),
        [first, rest @ ..] => first.inplace_op1(&Lock {
            op,
            rest,
            state: Cell::new(Some((locked, work))),
        }),
    }
}

/// Adds the storage that it is applied to.
struct Lock<'a, Work> {
    op: &'static str,
    rest: &'a [&'a Tensor],
    /// Taken by the only application.
    state: Cell<Option<(Locked<'a>, Work)>>,
}

impl<Work: FnOnce(Locked<'_>) -> Result<()>> Lock<'_, Work> {
    /// What was locked before, for as long as the storage of this op is.
    fn before<'s>(&'s self) -> Result<(Locked<'s>, Work)> {
        match self.state.take() {
            Some(state) => Ok(state),
            None => bail!("{} was applied twice", self.op),
        }
    }
}

impl<Work: FnOnce(Locked<'_>) -> Result<()>> InplaceOp1 for Lock<'_, Work> {
    fn name(&self) -> &'static str {
        self.op
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (mut locked, work) = self.before()?;
        locked.cpu.push((storage, layout));
        lock_rest(self.op, self.rest, locked, work)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let (mut locked, work) = self.before()?;
        locked.cuda.push((storage, layout));
        lock_rest(self.op, self.rest, locked, work)
    }
}
