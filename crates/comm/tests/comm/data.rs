//! Messages to test with: small whole numbers, which every element type holds exactly and adds without rounding.

use std::borrow::Cow;
use std::cell::RefCell;
use std::sync::OnceLock;

use espalier_comm::{Data, Element};
use espalier_tensor::{Category, DType, Device, Tensor};

/// All types of elements.
pub const ELEMENTS: [Element; 5] = [Element::F32, Element::Bf16, Element::U32, Element::U64, Element::F64];

static HOST: OnceLock<Device> = OnceLock::new();

thread_local! {
    static DEVICE: RefCell<Option<Device>> = const { RefCell::new(None) };
}

fn device() -> Device {
    let host = || HOST.get_or_init(|| Device::cpu(1).unwrap()).clone();
    DEVICE.with_borrow(|device| device.clone().unwrap_or_else(host))
}

/// Puts all tensors of this thread on a device, instead of the host.
pub fn use_device(device: Device) {
    DEVICE.set(Some(device));
}

/// The bytes of a message, wherever it is.
fn bytes(data: &Data) -> Cow<'_, [u8]> {
    match data {
        Data::Tensor(tensor) => tensor.host_bytes(),
        _ => Cow::Borrowed(data.bytes()),
    }
}

/// A message of `n` elements, the `i`-th of value `value(i)`.
pub fn message(element: Element, n: usize, value: impl Fn(usize) -> u32) -> Data {
    let category = Category::Communication;
    let floats = |dtype| {
        let values: Vec<f32> = (0..n).map(|i| value(i) as f32).collect();
        Data::Tensor(Tensor::from_f32(&device(), &[n], dtype, &values, category).unwrap())
    };
    match element {
        Element::F32 => floats(DType::F32),
        Element::Bf16 => floats(DType::Bf16),
        Element::U32 => {
            let values: Vec<u32> = (0..n).map(value).collect();
            Data::Tensor(Tensor::from_slice(&device(), &[n], &values, category).unwrap())
        }
        Element::U64 => Data::U64((0..n).map(|i| value(i).into()).collect()),
        Element::F64 => Data::F64((0..n).map(|i| value(i).into()).collect()),
    }
}

/// Room for `n` elements, filled with what no test expects.
pub fn receive_buffer(element: Element, n: usize) -> Data {
    message(element, n, |_| 99)
}

/// A tensor of f32.
pub fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(&device(), &[values.len()], values, Category::Communication).unwrap()
}

/// Asserts that a message holds `value(i)` everywhere.
#[track_caller]
pub fn assert_holds(what: &str, data: &Data, n: usize, value: impl Fn(usize) -> u32) {
    let expected = message(data.element(), n, value);
    assert_eq!(data.len(), n, "{what}: length");
    let (got, expected) = (bytes(data), bytes(&expected));
    if got != expected {
        let size = data.element().bytes();
        let wrong = got.chunks(size).zip(expected.chunks(size)).position(|(a, b)| a != b);
        panic!("{what}: element {} of {n} {} is wrong", wrong.unwrap(), data.element());
    }
}
