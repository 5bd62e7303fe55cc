"""Answer: two loads of 16 bytes, and 8 elements a thread."""

LISTING = """
 1  ld.param.u64   %rd1, [x];
 2  ld.param.u64   %rd2, [y];
 3  ld.param.f32   %f1, [a];
 4  ld.param.u32   %r3, [n4];
 5  mov.u32        %r4, %ntid.x;
 6  shl.b32        %r5, %r4, 1;
 7  mov.u32        %r6, %ctaid.x;
 8  mov.u32        %r7, %tid.x;
 9  mad.lo.s32     %r1, %r5, %r6, %r7;
10  add.s32        %r2, %r1, %r4;
11  setp.ge.s32    %p1, %r2, %r3;
12  @%p1 bra       $L__BB0_2;
13  cvta.to.global.u64     %rd3, %rd2;
14  cvta.to.global.u64     %rd4, %rd1;
15  mul.wide.s32   %rd5, %r1, 16;
16  add.s64        %rd6, %rd4, %rd5;
17  ld.global.nc.v4.f32    {%f2, %f3, %f4, %f5}, [%rd6];
18  mul.wide.s32   %rd7, %r2, 16;
19  add.s64        %rd8, %rd4, %rd7;
20  ld.global.nc.v4.f32    {%f10, %f11, %f12, %f13}, [%rd8];
21  add.s64        %rd9, %rd3, %rd5;
22  mul.f32        %f18, %f5, %f1;
23  mul.f32        %f19, %f4, %f1;
24  mul.f32        %f20, %f3, %f1;
25  mul.f32        %f21, %f2, %f1;
26  st.global.v4.f32       [%rd9], {%f21, %f20, %f19, %f18};
27  add.s64        %rd10, %rd3, %rd7;
28  mul.f32        %f22, %f13, %f1;
29  mul.f32        %f23, %f12, %f1;
30  mul.f32        %f24, %f11, %f1;
31  mul.f32        %f25, %f10, %f1;
32  st.global.v4.f32       [%rd10], {%f25, %f24, %f23, %f22};
   $L__BB0_2:
33  ret;
"""

LOADS = [17, 20]  # the lines that load data from x
GUARD = 12  # the line that leaves the kernel if there is nothing to do
ELEMENTS = 8  # float32 elements that a thread computes
DISTANCE = 16  # bytes between what a thread and its right neighbour load first
