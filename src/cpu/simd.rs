//! The vector operations that the kernels need, for f32 and f64, over [`pulp`].
//!
//! A kernel is written once as a [`WithSimd`](pulp::WithSimd) over `S: Simd` and `T: Real`; pulp
//! compiles it for AVX-512, AVX2, NEON and plain scalars, and [`arch`] picks one at run time. Nothing
//! here knows about attention.

use std::any::{Any, TypeId};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::__m512;
use std::ffi::OsString;
use std::ops::{Add, AddAssign, Div, Mul, Sub};
use std::sync::OnceLock;

use bytemuck::Pod;
use candle_core::{Result, bail};
use pulp::{Arch, Simd};

/// The instruction set to run on: the best that the machine has, detected once.
///
/// `CANDLE_FLASH_GQA_SIMD=avx2` or `scalar` asks for a lesser one, to test and to compare.
pub(crate) fn arch() -> Arch {
    match chosen() {
        Ok(arch) => *arch,
        // Of which `check_variable` has told the caller.
        Err(_) => Arch::new(),
    }
}

/// Refuses a `CANDLE_FLASH_GQA_SIMD` that names no instruction set.
pub(crate) fn check_variable() -> Result<()> {
    match chosen() {
        Ok(_) => Ok(()),
        Err(name) => {
            bail!("CANDLE_FLASH_GQA_SIMD must be avx2, scalar or not set, got {name:?}")
        }
    }
}

fn chosen() -> &'static std::result::Result<Arch, OsString> {
    static CHOSEN: OnceLock<std::result::Result<Arch, OsString>> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        match std::env::var_os("CANDLE_FLASH_GQA_SIMD").filter(|name| !name.is_empty()) {
            None => Ok(Arch::new()),
            Some(name) if name == "scalar" => Ok(Arch::Scalar),
            Some(name) if name == "avx2" => Ok(avx2()),
            Some(name) => Err(name),
        }
    })
}

/// AVX2, or on a machine without it the best that it has.
fn avx2() -> Arch {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = pulp::x86::V3::try_new() {
        return Arch::V3(avx2);
    }
    Arch::new()
}

/// An accumulation type.
pub(crate) trait Real:
    Pod
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
{
    /// `S::f32s` or `S::f64s`.
    type Vector<S: Simd>: Pod;

    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    /// The lowest finite number.
    const LOWEST: Self;
    /// `2^x - 1 = x * (EXP2M1[0] + EXP2M1[1] x + ...)` on [-1/2, 1/2].
    const EXP2M1: &'static [Self];
    /// Below this 2^x is a subnormal number, and [`exp2`] gives 0.
    const EXP2_LOWEST: Self;

    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;

    fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S>;
    fn vadd<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn vsub<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn vmul<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    fn vdiv<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `a * b + c`, fused where the machine can.
    fn mul_add<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
    ) -> Self::Vector<S>;
    fn abs<S: Simd>(simd: S, a: Self::Vector<S>) -> Self::Vector<S>;
    /// The larger of two numbers; either of them if one is NaN.
    fn max<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S>;
    /// `if a < b { c } else { d }` in each lane; `d` if one is NaN.
    fn select_lt<S: Simd>(
        simd: S,
        a: Self::Vector<S>,
        b: Self::Vector<S>,
        c: Self::Vector<S>,
        d: Self::Vector<S>,
    ) -> Self::Vector<S>;
    fn reduce_sum<S: Simd>(simd: S, a: Self::Vector<S>) -> Self;
    /// Splits `x` into the nearest integer `n` and `x - n`, and returns `(x - n, 2^n)`; 2^n is 0 at
    /// the lowest `n`.
    fn split_exponent<S: Simd>(simd: S, x: Self::Vector<S>) -> (Self::Vector<S>, Self::Vector<S>);
    /// The lanes of a vector.
    fn lanes_mut<S: Simd>(vector: &mut Self::Vector<S>) -> &mut [Self];
    /// A slice as whole vectors and the rest.
    fn as_vectors<S: Simd>(slice: &[Self]) -> (&[Self::Vector<S>], &[Self]);
    /// A mutable slice as whole vectors and the rest.
    fn as_vectors_mut<S: Simd>(slice: &mut [Self]) -> (&mut [Self::Vector<S>], &mut [Self]);
}

/// Numbers in one vector.
pub(crate) const fn lanes<S: Simd, T: Real>() -> usize {
    size_of::<T::Vector<S>>() / size_of::<T>()
}

macro_rules! impl_real {
    ($float:ident, $vector:ident, $bits:ident, $splat:ident, $add:ident, $sub:ident,
     $mul:ident, $div:ident, $mul_add:ident, $abs:ident, $max:ident, $less:ident, $select:ident,
     $sum:ident, $as_simd:ident, $as_mut_simd:ident,
     mantissa_bits: $mantissa_bits:literal, exponent_bias: $bias:literal, exp2m1: $exp2m1:expr) => {
        impl Real for $float {
            type Vector<S: Simd> = S::$vector;

            const ZERO: Self = 0.;
            const ONE: Self = 1.;
            const NEG_INFINITY: Self = $float::NEG_INFINITY;
            const LOWEST: Self = $float::MIN;
            const EXP2M1: &'static [Self] = &$exp2m1;
            const EXP2_LOWEST: Self = -$bias as $float;

            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $float
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: Self) -> Self::Vector<S> {
                simd.$splat(x)
            }
            #[inline(always)]
            fn vadd<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S> {
                simd.$add(a, b)
            }
            #[inline(always)]
            fn vsub<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S> {
                simd.$sub(a, b)
            }
            #[inline(always)]
            fn vmul<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S> {
                simd.$mul(a, b)
            }
            #[inline(always)]
            fn vdiv<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S> {
                simd.$div(a, b)
            }
            #[inline(always)]
            fn mul_add<S: Simd>(
                simd: S,
                a: Self::Vector<S>,
                b: Self::Vector<S>,
                c: Self::Vector<S>,
            ) -> Self::Vector<S> {
                simd.$mul_add(a, b, c)
            }
            #[inline(always)]
            fn abs<S: Simd>(simd: S, a: Self::Vector<S>) -> Self::Vector<S> {
                simd.$abs(a)
            }
            #[inline(always)]
            fn max<S: Simd>(simd: S, a: Self::Vector<S>, b: Self::Vector<S>) -> Self::Vector<S> {
                simd.$max(a, b)
            }
            #[inline(always)]
            fn select_lt<S: Simd>(
                simd: S,
                a: Self::Vector<S>,
                b: Self::Vector<S>,
                c: Self::Vector<S>,
                d: Self::Vector<S>,
            ) -> Self::Vector<S> {
                simd.$select(simd.$less(a, b), c, d)
            }
            #[inline(always)]
            fn reduce_sum<S: Simd>(simd: S, a: Self::Vector<S>) -> Self {
                simd.$sum(a)
            }
            #[inline(always)]
            fn split_exponent<S: Simd>(
                simd: S,
                x: Self::Vector<S>,
            ) -> (Self::Vector<S>, Self::Vector<S>) {
                // 1.5 * 2^mantissa_bits: adding it leaves the nearest integer in the lowest bits.
                const MAGIC: $float = (3u64 << ($mantissa_bits - 1)) as $float;
                let magic = simd.$splat(MAGIC);
                let shifted = simd.$add(x, magic);
                let fraction = simd.$sub(x, simd.$sub(shifted, magic));
                // pulp has no 64-bit shift; this loop over one vector compiles to one instruction.
                let mut scale = shifted;
                for word in bytemuck::cast_slice_mut::<_, $bits>(std::slice::from_mut(&mut scale)) {
                    *word = word.wrapping_add($bias) << $mantissa_bits;
                }
                (fraction, scale)
            }
            #[inline(always)]
            fn lanes_mut<S: Simd>(vector: &mut Self::Vector<S>) -> &mut [Self] {
                bytemuck::cast_slice_mut(std::slice::from_mut(vector))
            }
            #[inline(always)]
            fn as_vectors<S: Simd>(slice: &[Self]) -> (&[Self::Vector<S>], &[Self]) {
                S::$as_simd(slice)
            }
            #[inline(always)]
            fn as_vectors_mut<S: Simd>(
                slice: &mut [Self],
            ) -> (&mut [Self::Vector<S>], &mut [Self]) {
                S::$as_mut_simd(slice)
            }
        }
    };
}

impl_real!(
    f32, f32s, u32, splat_f32s, add_f32s, sub_f32s, mul_f32s, div_f32s, mul_add_e_f32s, abs_f32s,
    max_f32s, less_than_f32s, select_f32s, reduce_sum_f32s, as_simd_f32s,
    as_mut_simd_f32s,
    mantissa_bits: 23, exponent_bias: 127,
    // Minimax (Remez) for the relative error of 2^x: 2.6e-9.
    exp2m1: [std::f32::consts::LN_2, 0.240_226_53, 0.055_503_107, 0.009_617_693, 0.001_340_664_4, 0.000_155_946_78]
);

impl_real!(
    f64, f64s, u64, splat_f64s, add_f64s, sub_f64s, mul_f64s, div_f64s, mul_add_e_f64s, abs_f64s,
    max_f64s, less_than_f64s, select_f64s, reduce_sum_f64s, as_simd_f64s,
    as_mut_simd_f64s,
    mantissa_bits: 52, exponent_bias: 1023,
    // Taylor, ln(2)^k / k!: the first term left out is below 1e-18.
    exp2m1: [
        std::f64::consts::LN_2, 0.240_226_506_959_100_7, 0.055_504_108_664_821_58,
        0.009_618_129_107_628_477, 0.001_333_355_814_642_844_3, 0.000_154_035_303_933_816_1,
        1.525_273_380_405_984e-5, 1.321_548_679_014_431e-6, 1.017_808_600_923_97e-7,
        7.054_911_620_801_123e-9, 4.445_538_271_870_811e-10, 2.567_843_599_348_820_5e-11,
        1.369_148_885_390_412_9e-12
    ]
);

/// Asks for the cache line of an address, which will be read once; a hint that reads nothing, so the
/// address may be any.
#[inline(always)]
pub(crate) fn prefetch<E>(address: *const E) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_NTA, _mm_prefetch};
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_NTA>(address.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// AVX-512, if that is what `simd` is.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn avx512<S: Simd>(simd: S) -> Option<pulp::x86::V4> {
    (&simd as &dyn Any).downcast_ref().copied()
}

/// The sum of each vector's lanes, which has the same bits whatever the other vectors are.
#[inline(always)]
pub(crate) fn sums<S: Simd, T: Real, const M: usize, const N: usize>(
    simd: S,
    vectors: &[[T::Vector<S>; M]; N],
) -> [[T; M]; N] {
    let mut sums = [[T::ZERO; M]; N];
    #[cfg(target_arch = "x86_64")]
    if let Some(avx512) = avx512(simd)
        && TypeId::of::<T>() == TypeId::of::<f32>()
        && M * N <= 16
    {
        let mut all = [avx512.avx512f._mm512_setzero_ps(); 16];
        for (all, &vector) in all.iter_mut().zip(vectors.as_flattened()) {
            *all = bytemuck::cast(vector);
        }
        let all = sums_of_16(avx512, all);
        sums.as_flattened_mut()
            .copy_from_slice(&bytemuck::cast_slice(&all)[..M * N]);
        return sums;
    }
    for (sums, vectors) in sums.iter_mut().zip(vectors) {
        for (sum, &vector) in sums.iter_mut().zip(vectors) {
            *sum = T::reduce_sum(simd, vector);
        }
    }
    sums
}

/// The sums of the lanes of 16 vectors, by a tree that transposes as it adds: 15 additions and 30
/// shuffles, where one vector after the other takes 64 of each.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn sums_of_16(simd: pulp::x86::V4, vectors: [__m512; 16]) -> [f32; 16] {
    let simd = simd.avx512f;
    // Two vectors become one that alternates between their sums, in quarters of four lanes.
    let mut pairs = [simd._mm512_setzero_pd(); 8];
    for (pair, vectors) in pairs.iter_mut().zip(vectors.chunks_exact(2)) {
        let low = simd._mm512_unpacklo_ps(vectors[0], vectors[1]);
        let high = simd._mm512_unpackhi_ps(vectors[0], vectors[1]);
        *pair = simd._mm512_castps_pd(simd._mm512_add_ps(low, high));
    }
    // Each quarter then holds one number of each of four vectors.
    let mut fours = [simd._mm512_setzero_ps(); 4];
    for (four, pairs) in fours.iter_mut().zip(pairs.chunks_exact(2)) {
        let low = simd._mm512_unpacklo_pd(pairs[0], pairs[1]);
        let high = simd._mm512_unpackhi_pd(pairs[0], pairs[1]);
        *four = simd._mm512_add_ps(simd._mm512_castpd_ps(low), simd._mm512_castpd_ps(high));
    }
    // The quarters of four vectors are added, twice in pairs.
    let mut eights = [simd._mm512_setzero_ps(); 2];
    for (eight, fours) in eights.iter_mut().zip(fours.chunks_exact(2)) {
        *eight = simd._mm512_add_ps(
            simd._mm512_shuffle_f32x4::<0b10_00_10_00>(fours[0], fours[1]),
            simd._mm512_shuffle_f32x4::<0b11_01_11_01>(fours[0], fours[1]),
        );
    }
    bytemuck::cast(simd._mm512_add_ps(
        simd._mm512_shuffle_f32x4::<0b10_00_10_00>(eights[0], eights[1]),
        simd._mm512_shuffle_f32x4::<0b11_01_11_01>(eights[0], eights[1]),
    ))
}

/// `EXP2M1`'s polynomial: `(2^x - 1)` on [-1/2, 1/2].
#[inline(always)]
fn exp2m1_fraction<S: Simd, T: Real>(simd: S, x: T::Vector<S>) -> T::Vector<S> {
    let (last, rest) = T::EXP2M1.split_last().expect("coefficients");
    let mut sum = T::splat(simd, *last);
    for &coefficient in rest.iter().rev() {
        sum = T::mul_add(simd, sum, x, T::splat(simd, coefficient));
    }
    T::vmul(simd, sum, x)
}

/// 2^x for `x` up to the largest exponent; 0 where the result would be subnormal; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp2<S: Simd, T: Real>(simd: S, x: T::Vector<S>) -> T::Vector<S> {
    let lowest = T::splat(simd, T::EXP2_LOWEST);
    let x = T::select_lt(simd, x, lowest, lowest, x);
    let (fraction, scale) = T::split_exponent(simd, x);
    T::mul_add(simd, scale, exp2m1_fraction::<S, T>(simd, fraction), scale)
}

/// tanh(x), accurate to a few roundings also near 0; NaN stays NaN.
///
/// `tanh(x) = e / (e + 2)` with `e = exp(2x) - 1`, on |x|.
#[inline(always)]
pub(crate) fn tanh<S: Simd, T: Real>(simd: S, x: T::Vector<S>) -> T::Vector<S> {
    let zero = T::splat(simd, T::ZERO);
    // Beyond 2^60 the quotient is 1 in both types.
    let highest = T::splat(simd, T::from_f64(60.));
    let doubled = T::vmul(
        simd,
        T::abs(simd, x),
        T::splat(simd, T::from_f64(2. * std::f64::consts::LOG2_E)),
    );
    let doubled = T::select_lt(simd, highest, doubled, highest, doubled);
    let (fraction, scale) = T::split_exponent(simd, doubled);
    let exponential = T::mul_add(
        simd,
        scale,
        exp2m1_fraction::<S, T>(simd, fraction),
        T::vsub(simd, scale, T::splat(simd, T::ONE)),
    );
    let magnitude = T::vdiv(
        simd,
        exponential,
        T::vadd(simd, exponential, T::splat(simd, T::from_f64(2.))),
    );
    T::select_lt(simd, x, zero, T::vsub(simd, zero, magnitude), magnitude)
}

#[cfg(test)]
mod tests {
    use pulp::{Scalar, WithSimd};

    use super::*;

    /// Applies a function of one vector to whole vectors of numbers.
    struct Apply<'a, T> {
        numbers: &'a mut [T],
        function: Function,
    }

    #[derive(Clone, Copy)]
    enum Function {
        Exp2,
        Tanh,
    }

    impl<T: Real> WithSimd for Apply<'_, T> {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let (vectors, tail) = T::as_vectors_mut::<S>(self.numbers);
            assert!(tail.is_empty());
            for x in vectors {
                *x = match self.function {
                    Function::Exp2 => exp2::<S, T>(simd, *x),
                    Function::Tanh => tanh::<S, T>(simd, *x),
                };
            }
        }
    }

    /// Largest relative error over a sweep, on the machine's vectors and on scalars, against f64's own.
    fn worst<T: Real>(function: Function, from: f64, to: f64, exact: fn(f64) -> f64) -> f64 {
        const COUNT: usize = 1 << 16;
        let inputs: Vec<T> = (0..COUNT)
            .map(|i| T::from_f64(from + (to - from) * i as f64 / COUNT as f64))
            .collect();
        let mut worst = 0f64;
        for scalar in [false, true] {
            let mut outputs = inputs.clone();
            let apply = Apply {
                numbers: &mut outputs,
                function,
            };
            if scalar {
                Simd::vectorize(Scalar::new(), apply);
            } else {
                arch().dispatch(apply);
            }
            for (x, y) in inputs.iter().zip(&outputs) {
                let exact = exact(x.to_f64());
                let error = (y.to_f64() - exact).abs();
                worst = worst.max(if exact == 0. {
                    error
                } else {
                    error / exact.abs()
                });
            }
        }
        worst
    }

    #[test]
    fn exp2_is_accurate_to_a_few_roundings() {
        let f32_error = worst::<f32>(Function::Exp2, -125., 100., f64::exp2);
        assert!(f32_error < 3. * f64::from(f32::EPSILON), "{f32_error:e}");
        let f64_error = worst::<f64>(Function::Exp2, -1000., 100., f64::exp2);
        assert!(f64_error < 3. * f64::EPSILON, "{f64_error:e}");
    }

    #[test]
    fn tanh_is_accurate_to_a_few_roundings_also_near_zero() {
        for (from, to) in [(-20., 20.), (-1., 1.), (-1e-3, 1e-3)] {
            let f32_error = worst::<f32>(Function::Tanh, from, to, f64::tanh);
            assert!(f32_error < 5. * f64::from(f32::EPSILON), "{f32_error:e}");
            let f64_error = worst::<f64>(Function::Tanh, from, to, f64::tanh);
            assert!(f64_error < 5. * f64::EPSILON, "{f64_error:e}");
        }
    }

    #[test]
    fn exp2_of_the_lowest_numbers_is_zero_and_of_nan_is_nan() {
        let mut numbers = [f32::NEG_INFINITY; 16];
        numbers[1] = f32::MIN;
        numbers[2] = -127.;
        numbers[3] = f32::NAN;
        numbers[4] = 0.;
        arch().dispatch(Apply {
            numbers: &mut numbers,
            function: Function::Exp2,
        });
        assert_eq!(numbers[0], 0.);
        assert_eq!(numbers[1], 0.);
        assert_eq!(numbers[2], 0.);
        assert!(numbers[3].is_nan());
        assert_eq!(numbers[4], 1.);
    }

    #[test]
    fn tanh_of_infinity_is_one_and_of_nan_is_nan() {
        let mut numbers = [f64::INFINITY; 16];
        numbers[1] = f64::NEG_INFINITY;
        numbers[2] = f64::NAN;
        arch().dispatch(Apply {
            numbers: &mut numbers,
            function: Function::Tanh,
        });
        assert_eq!(numbers[0], 1.);
        assert_eq!(numbers[1], -1.);
        assert!(numbers[2].is_nan());
    }
}
