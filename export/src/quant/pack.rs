/// Packs codes of 2, 4 or 8 bits into bytes, the first code in the lowest bits. `codes` fills `out` exactly and holds
/// no value that needs more bits.
pub fn pack(codes: &[u8], bits: u8, out: &mut [u8]) {
    match bits {
        2 => {
            for (byte, c) in out.iter_mut().zip(codes.as_chunks::<4>().0) {
                *byte = c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6;
            }
        }
        4 => {
            for (byte, c) in out.iter_mut().zip(codes.as_chunks::<2>().0) {
                *byte = c[0] | c[1] << 4;
            }
        }
        _ => out.copy_from_slice(codes),
    }
}

/// The codes in `packed`, `8 / bits` per byte.
pub fn unpack(packed: &[u8], bits: u8) -> Vec<u8> {
    let mask = u8::MAX >> (8 - bits);
    packed.iter().flat_map(|byte| (0..8 / bits).map(move |i| byte >> (i * bits) & mask)).collect()
}
