"""Answer: four accesses to local memory, three of them in the loop."""

LISTING = """
00d0             IMAD.MOV.U32 R2, RZ, RZ, 0x10 ;
00e0             IADD3 R4, R0.reuse, 0x200, RZ ;
00f0             IMAD.MOV.U32 R25, RZ, RZ, RZ ;
0100             CS2R R6, SRZ ;
0110             IMAD.WIDE R2, R0, R2, c[0x0][0x160] ;
0120             CS2R R10, SRZ ;
0130             STL [R1], R4 ;
0140             CS2R R8, SRZ ;
0150             IMAD.MOV.U32 R24, RZ, RZ, R3 ;
0160             MOV R0, R2 ;
0170             CS2R R18, SRZ ;
0180             CS2R R16, SRZ ;
0190             CS2R R4, SRZ ;
         .L_x_2:
01a0             LDL R2, [R1] ;
01b0             MOV R23, 0x8 ;
01c0             MOV R3, R24 ;
01d0             IADD3 R22, R2, -0x200, RZ ;
01e0             IMAD.MOV.U32 R2, RZ, RZ, R0 ;
01f0             IMAD.WIDE R22, R22, R23, c[0x0][0x168] ;
0200             LDG.E.128.CONSTANT R12, [R2.64] ;
0210             LDG.E.64.CONSTANT R20, [R22.64+0x800] ;
0220             LDG.E.64.CONSTANT R2, [R22.64] ;
0230             LDG.E.64.CONSTANT R22, [R22.64+0x1000] ;
0240             HMMA.16816.F32 R16, R12, R2, R16 ;
0250             LDL.LU R3, [R1] ;
0260             IADD3 R25, R25, 0x1, RZ ;
0270             ISETP.GE.AND P0, PT, R25, c[0x0][0x178], PT ;
0280             IADD3 R0, P1, R0, 0x1000, RZ ;
0290             HMMA.16816.F32 R8, R12, R20, R8 ;
02a0             IMAD.X R24, RZ, RZ, R24, P1 ;
02b0             HMMA.16816.F32 R4, R12, R22, R4 ;
02c0             IADD3 R3, R3, 0x300, RZ ;
02d0             STL [R1], R3 ;
02e0        @!P0 BRA `(.L_x_2) ;
02f0             S2R R3, SR_TID.X ;
0300             MOV R2, 0x10 ;
0310             IMAD.WIDE R2, R3, R2, c[0x0][0x170] ;
0320             STG.E.128 [R2.64], R16 ;
0330             STG.E.128 [R2.64+0x1000], R8 ;
0340             STG.E.128 [R2.64+0x2000], R4 ;
0350             EXIT ;
"""

WIDE_LOAD = 0x0200  # the load of 16 bytes a thread
TENSOR_CORE = [0x0240, 0x0290, 0x02B0]  # all instructions on tensor cores
SPILLS = [0x0130, 0x01A0, 0x0250, 0x02D0]  # all accesses to spilled registers
SPILLS_A_PASS = 3  # how many of them each pass of the loop executes
