//! Drivers that are known to compute wrongly. A self-test need not meet the fault.

use super::Adapter;

/// A fault of a driver before some version of Mesa.
struct DriverFault {
    /// A part of the adapter's name.
    adapter: &'static str,
    /// The first version, major and minor, without it.
    mended: (u32, u32),
    what: &'static str,
}

const FAULTS: &[DriverFault] = &[
    // <https://github.com/ROCm/legacy-rocm-build/issues/6313>: later versions hide that queue.
    DriverFault {
        adapter: "GFX1013",
        mended: (25, 1),
        what: "its compute queue may return wrong results under Mesa before 25.1: update Mesa",
    },
];

impl Adapter {
    /// What its driver is known to get wrong, and what to do about it.
    pub fn driver_fault(&self) -> Option<&'static str> {
        let version = mesa_version(&self.driver)?;
        let known =
            |fault: &&DriverFault| self.name.to_uppercase().contains(fault.adapter) && version < fault.mended;
        FAULTS.iter().find(known).map(|fault| fault.what)
    }
}

/// Major and minor of `radv Mesa 25.0.7-2ubuntu1`; none for drivers that are not Mesa's.
fn mesa_version(driver: &str) -> Option<(u32, u32)> {
    let (_, version) = driver.split_once("Mesa ")?;
    let mut parts = version.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}
