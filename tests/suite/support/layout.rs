//! The same values in other storage orders, with NaN in every number that is not part of the view.

use anyhow::Result;
use candle_core::Tensor;

use super::tensors::full;

/// How a `(batch, seqlen, num_heads, head_dim)` tensor lies in its storage.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// The dimensions of the tensor, outermost in the storage first.
    pub order: [usize; 4],
    /// For each dimension of the tensor, the numbers before and after it that the view leaves out.
    pub gaps: [[usize; 2]; 4],
    /// Whether a NaN stands between any two numbers.
    pub interleaved: bool,
}

impl Layout {
    pub const CONTIGUOUS: Self = Self {
        order: [0, 1, 2, 3],
        gaps: [[0; 2]; 4],
        interleaved: false,
    };
    pub const BHSD: Self = Self::CONTIGUOUS.ordered([0, 2, 1, 3]);
    pub const SBHD: Self = Self::CONTIGUOUS.ordered([1, 0, 2, 3]);
    pub const BSDH: Self = Self::CONTIGUOUS.ordered([0, 1, 3, 2]);
    /// Rows of `head_dim + 1` numbers, the view from the second on.
    pub const ODD_ROWS: Self = Self {
        gaps: [[0; 2], [0; 2], [0; 2], [1, 0]],
        ..Self::CONTIGUOUS
    };
    /// Some of the sequence of a longer cache.
    pub const CACHE: Self = Self {
        gaps: [[0; 2], [5, 40], [0; 2], [0; 2]],
        ..Self::BHSD
    };
    /// Some of the heads of a fused projection.
    pub const FUSED: Self = Self {
        gaps: [[0; 2], [0; 2], [3, 2], [0; 2]],
        ..Self::CONTIGUOUS
    };
    pub const STRIDED_LAST: Self = Self {
        interleaved: true,
        ..Self::CONTIGUOUS
    };
    /// Everything at once.
    pub const WILD: Self = Self {
        order: [3, 1, 0, 2],
        gaps: [[1, 2], [3, 1], [0, 1], [2, 5]],
        interleaved: true,
    };

    const fn ordered(self, order: [usize; 4]) -> Self {
        Self { order, ..self }
    }

    /// A contiguous tensor that holds `values` as this layout has it.
    pub fn store(&self, values: &Tensor) -> Result<Tensor> {
        let mut storage = values.clone();
        for (dim, &[before, after]) in self.gaps.iter().enumerate() {
            let gap = |length: usize| {
                let mut dims = storage.dims().to_vec();
                dims[dim] = length;
                full(&dims, f64::NAN, values.dtype(), values.device())
            };
            storage = Tensor::cat(&[&gap(before)?, &storage, &gap(after)?], dim)?;
        }
        let storage = storage.permute(self.order)?.contiguous()?;
        if self.interleaved {
            let nan = full(storage.dims(), f64::NAN, values.dtype(), values.device())?;
            return Ok(Tensor::stack(&[&storage, &nan], 4)?);
        }
        Ok(storage)
    }

    /// The values in a storage that [`Layout::store`] has made, or in a gradient of one.
    pub fn view(&self, storage: &Tensor) -> Result<Tensor> {
        let storage = if self.interleaved {
            storage.narrow(4, 0, 1)?.squeeze(4)?
        } else {
            storage.clone()
        };
        let mut inverse = [0; 4];
        for (i, &dim) in self.order.iter().enumerate() {
            inverse[dim] = i;
        }
        let mut view = storage.permute(inverse)?;
        for (dim, &[before, after]) in self.gaps.iter().enumerate() {
            let length = view.dims()[dim] - before - after;
            view = view.narrow(dim, before, length)?;
        }
        Ok(view)
    }
}

#[test]
fn a_layout_gives_back_its_values_with_the_strides_it_names() -> Result<()> {
    let device = &candle_core::Device::Cpu;
    let values = Tensor::arange(0f32, 2. * 3. * 4. * 5., device)?.reshape((2, 3, 4, 5))?;
    for layout in [Layout::BHSD, Layout::BSDH, Layout::CACHE, Layout::WILD] {
        let view = layout.view(&layout.store(&values)?)?;
        super::compare::identical("view", &view, &values)?;
        assert!(!view.is_contiguous(), "{layout:?}");
    }
    let odd = Layout::ODD_ROWS;
    let view = odd.view(&odd.store(&values)?)?;
    assert_eq!(
        (view.stride(), view.layout().start_offset()),
        (&[72, 24, 6, 1][..], 1)
    );
    Ok(())
}
